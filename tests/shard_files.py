"""Shards of all formats, written for tests."""

import gzip
import io
import json
import tarfile

import pyarrow
import pyarrow.parquet
from torch.utils.data import DataLoader

from gemma_trainer import shards
from gemma_trainer.errors import RowError

FORMATS = (".jsonl", ".jsonl.gz", ".parquet", ".tar", ".tar.gz")


def write(path, rows):
    """A shard of rows, in the format that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.name.endswith((".tar", ".tar.gz")):
        files = {f"row-{number}.json": json.dumps(row).encode() for number, row in enumerate(rows)}
        archive(path, files)
    elif path.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(rows, pyarrow.schema([("prompt", "string"), ("completion", "string")]))
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def archive(path, files):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def numbered(first, last):
    """Rows that are told by their prompt, and whose length grows and falls."""
    return [{"prompt": f"{number}", "completion": "x" * (number * 7 % 23)} for number in range(first, last)]


def told(rows):
    return [int(row["prompt"]) for row in rows]


def rows_of(*sources):
    return [record.row() for record in shards.open_shards(list(map(str, sources)))]


def problems(rows):
    return [str(row) for row in rows if isinstance(row, RowError)]


def length(rows):
    return [len(row["completion"]) + 1 for row in rows]


def delivered(stream, batches, workers=0):
    """The next batches of a rank, through a loader."""
    found = []
    for batch in DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=list):
        stream.delivered += 1
        found.append(told(batch))
        if len(found) == batches:
            return found
