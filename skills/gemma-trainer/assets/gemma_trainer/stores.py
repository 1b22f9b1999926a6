"""Files of object stores, by URL (`s3://`, `gs://`, `hf://`, ... through fsspec). Nothing is imported before one is."""

from __future__ import annotations

import posixpath
from collections import OrderedDict

from .errors import CannotLoad, EnvironmentUnfit, MediaError, UsageError

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
MAX_MEDIUM_BYTES = 100 * 2**20
MAX_KEPT_BYTES = 64 * 2**20  # of media that were fetched to be measured, and are opened next
_kept: OrderedDict[str, bytes] = OrderedDict()


def is_url(name: str) -> bool:
    """Whether a name is one of an object store or of another file system than the machine's own."""
    return "://" in name


def file_system(url: str):
    """(the fsspec file system that a URL is of, the path in it).

    Raises:
        EnvironmentUnfit: the package for this kind of URL is missing.
        UsageError: no such kind of URL is known.
    """
    import fsspec

    protocol = url.split("://")[0]
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as problem:
        told = f"pip install {PACKAGES[protocol]}" if protocol in PACKAGES else str(problem)
        raise EnvironmentUnfit(f"{protocol}:// needs a package: {told}") from None
    except ValueError as problem:
        raise UsageError(f"{url}: no URL that can be read ({str(problem).splitlines()[0]})") from None
    except Exception as problem:  # credentials, the network: each store raises errors of its own
        raise unreachable(url, problem) from None


def unreachable(url: str, problem: BaseException) -> CannotLoad:
    """What to raise where a store does not answer."""
    told = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:200]
    return CannotLoad(f"{url}: cannot be read ({told}). Are the credentials and the network there?")


def medium(folder: str, name: str) -> bytes:
    """The bytes of a medium that a data file of a store names, relative to the file's own folder.

    Nothing else can be named: the row comes from elsewhere, and neither this machine's files nor what lies outside the
    folder of its data file is its to read.

    Raises:
        MediaError: the name leads out of the folder, or there is no such file, or it is empty or too large.
    """
    inside = posixpath.normpath(name.replace("\\", "/"))
    if inside.startswith(("/", "~", "../")) or inside in ("..", "."):
        raise MediaError(
            "a file outside the folder of its data file, which is in an object store", "media_outside_root"
        )
    url = f"{folder.rstrip('/')}/{inside}"
    if url in _kept:
        return _kept[url]
    system, path = file_system(url)
    try:
        with system.open(path, "rb") as file:
            content = file.read(MAX_MEDIUM_BYTES + 1)
    except FileNotFoundError:
        raise MediaError(f"no such file: {url}", "media_missing") from None
    except Exception as problem:  # as above
        raise MediaError(str(unreachable(url, problem)), "media_missing") from None
    if not content:
        raise MediaError(f"empty file: {url}")
    if len(content) > MAX_MEDIUM_BYTES:
        raise MediaError("a file of more than 100 MiB in an object store")
    _keep(url, content)
    return content


def _keep(url: str, content: bytes) -> None:
    _kept[url] = content
    while sum(map(len, _kept.values())) > MAX_KEPT_BYTES:
        _kept.popitem(last=False)
