"""Folders of media as rows, laid out as the `datasets` library's imagefolder and audiofolder read them.

Three layouts: a metadata.csv / .jsonl / .parquet whose `file_name` column names the files; a text file of the same stem
beside each file (`cat.png`, `cat.txt`); or class folders, whose names are the labels.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import RowError
from .files import user_path
from .parts import Part, named
from .rows import FILE_COLUMN
from .sources import SUFFIXES, Rows, open_rows

SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
IMAGES = frozenset(
    ".png .jpg .jpeg .jpe .jfif .webp .gif .bmp .dib .tif .tiff .apng .avif .heic .jp2 .ico .tga .ppm .pgm .pbm".split()
)
AUDIO = frozenset(".wav .flac .mp3 .ogg .opus .oga .m4a .aac .aif .aiff .au .caf .w64 .wma .webm".split())


def media_kind(name) -> str | None:
    """ "image" or "audio" by the suffix of a file name or URL; None for any other."""
    suffix = os.path.splitext(str(name).split("?")[0])[1].lower()
    return "image" if suffix in IMAGES else "audio" if suffix in AUDIO else None


def open_sources(sources: list[str]) -> tuple[Rows, list[str]]:
    """Open data sources as `sources.open_rows` does, and folders of media as well.

    Returns:
        (rows, notes): a row of a folder without metadata is `{"image": name, "caption": text}`, `{"audio": name,
        "transcript": text}`, or either with `"label"`; the notes tell what in a folder was not read.

    Raises: as `sources.open_rows`.
    """
    parts, notes = [], []
    for source in sources:
        folder = user_path(source)
        found = _walk(folder) if folder.is_dir() else None
        metadata = _metadata(found or [])
        splits = {path.relative_to(folder).parts[0] for path in found or [] if path.parent != folder} & SPLITS
        if len(splits) > 1:
            notes.append(
                f"{source}: {', '.join(sorted(splits))} are read as one; convert each alone to keep them apart"
            )
        if metadata:
            parts += metadata
            if others := sum(path.suffix.lower() in SUFFIXES for path in found) - len(metadata):
                notes.append(f"{source}: read by its metadata files; {others} other data files there were not read")
        elif found and not any(path.suffix.lower() in SUFFIXES for path in found):
            parts.append(_MediaFolder(folder, found))
        else:
            parts += open_rows([source]).parts
    return Rows(parts), notes


def _walk(folder: Path) -> list[Path]:
    """The files under a folder, in order, but for hidden ones; empty where none is of use."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in sorted(names) if not name.startswith(".")]
    useful = any(path.name in METADATA or media_kind(path) for path in found)
    return found if useful else []


def _metadata(found: list[Path]) -> list:
    """The opened metadata files that name media; others of such a name are data like any."""
    parts = [part for path in found if path.name in METADATA for part in open_rows([str(path)]).parts]
    return [
        part for part in parts if any(FILE_COLUMN.search(str(key)) for row in part.read(0, 1) for key in _keys(row))
    ]


def _keys(row) -> list:
    return [] if isinstance(row, RowError) else list(row)


class _MediaFolder(Part):
    """The media files under a folder, each with its text file or else the name of the folder it is in."""

    def __init__(self, folder: Path, found: list[Path]):
        super().__init__(folder)
        self.folder = str(folder)
        self.files = [path for path in found if media_kind(path)]
        texts = {path.with_suffix("") for path in found if path.suffix.lower() == ".txt"}
        self.captioned = any(path.with_suffix("") in texts for path in self.files)
        # As in `datasets`, folder names are labels only where there are several, all at one depth.
        depths = {len(path.parts) for path in self.files}
        self.labelled = len({path.parent.name for path in self.files}) > 1 and len(depths) == 1

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict:
        path, name = self.files[index], self.name_of(index)
        row = {media_kind(path): name}
        if self.captioned:
            row["caption" if "image" in row else "transcript"] = _text_beside(path, name)
        elif self.labelled:
            row["label"] = path.parent.name
        else:
            raise RowError(name, "no metadata file, no .txt of the same name, and no class folders", "missing_field")
        return named(row, name, self.folder)

    def name_of(self, index: int) -> str:
        return self.files[index].relative_to(self.place).as_posix()


def _text_beside(path: Path, name: str) -> str:
    found = next((p for p in (path.with_suffix(".txt"), path.with_suffix(".TXT")) if p.is_file()), None)
    try:
        text = found.read_text(encoding="utf-8-sig").strip() if found else ""
    except UnicodeDecodeError:
        raise RowError(name, "its .txt file is not UTF-8 text", "bad_encoding") from None
    if not text:
        raise RowError(name, f"{'an empty' if found else 'no'} .txt file beside it", "missing_field")
    return text
