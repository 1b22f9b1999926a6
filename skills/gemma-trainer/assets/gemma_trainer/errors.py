"""The errors a run may end in, each with its exit code. Messages are one or two lines: what, where, what to do."""

from __future__ import annotations

import re


class TrainerError(Exception):
    """An error that is told to the user without a traceback.

    `exit_code` is what the script returns; `kind` names it in `--json` output.
    """

    exit_code = 1
    kind = "fault"

    def __init__(self, message: str):
        if message.startswith("Caught "):  # torch hands on a worker's error as the text of its traceback
            message = re.sub(r"^(\w+\.)+\w+: ", "", message.strip().splitlines()[-1])
        super().__init__(message)


class UsageError(TrainerError):
    """A flag or a call is wrong."""

    exit_code = 2
    kind = "usage"


class DataError(TrainerError):
    """The data set holds something that cannot be trained on."""

    exit_code = 3
    kind = "data"


class Fault(ValueError):
    """What is wrong with a part of a row, and the code of its kind (see `findings.py`)."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class RowError(DataError):
    """One row is bad. The message starts with the row's name (`file:line`); `code` is the kind of fault."""

    def __init__(self, row: str, reason: str = "", code: str = "bad_row"):
        super().__init__(f"{row}: {reason}" if reason else row)
        self.row, self.reason, self.code = row, reason, code

    def __reduce__(self):  # exceptions cross process borders when dataloader workers raise them
        return type(self), (self.row, self.reason, self.code)


class MediaError(DataError):
    """One image or clip cannot be read. The message says why; whoever catches it knows the row."""

    def __init__(self, message: str, code: str = "media_unreadable"):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return type(self), (str(self), self.code)


class EnvironmentUnfit(TrainerError):
    """A package, a driver or disk space is missing."""

    exit_code = 4
    kind = "environment"


class CannotLoad(TrainerError):
    """A model or a hub data set cannot be loaded: gated, offline, or of the wrong kind."""

    exit_code = 5
    kind = "load"


class OutOfMemory(TrainerError):
    exit_code = 6
    kind = "memory"


class Diverged(TrainerError):
    """The loss or the gradient is no longer a number."""

    exit_code = 7
    kind = "diverged"


class Interrupted(BaseException):
    """Stopped by a signal; `exit_code` is 130 (Ctrl-C) or 143 (terminated). No `except Exception` swallows it."""

    kind = "interrupted"

    def __init__(self, message: str, exit_code: int = 130):
        super().__init__(message)
        self.exit_code = exit_code
