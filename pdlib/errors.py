"""Every error that pdlib raises on purpose; one class per failure, each text ends with what to do next."""

from __future__ import annotations

from collections.abc import Sequence


class PdlibError(Exception):
    """Base of every error of pdlib: catching it catches what pdlib refuses, and nothing else."""


class ContractError(PdlibError):
    """A contract (leaf row, item, registry or its TOML file) says something impossible or was changed."""


class SpecMismatch(PdlibError):
    """Trees differ from their contracts, or from what was asked for; lists every difference at once.

    Attributes:
        problems: one line per difference, each starting with the leaf's path.
    """

    def __init__(self, subject: str, problems: Sequence[str], *, hint: str) -> None:
        self.problems = tuple(problems)
        body = "\n".join(f"  {line}" for line in self.problems)
        super().__init__(f"{subject}\n{body}\n{hint}")


class NameCollision(PdlibError):
    """Two leaves would be stored under one name, or one name cannot be a file name."""


class UnstorableLeaf(PdlibError):
    """A leaf is not an array, or has a dtype that cannot be stored bit for bit."""


class ShardingRefused(PdlibError):
    """A mesh axis does not divide the dimension it should split."""


class NotARun(PdlibError):
    """A path is not a run or a checkpoint directory: it is missing, or one level too deep or too shallow."""


class NoCheckpoint(PdlibError):
    """The directory is right, but holds no step, not this step, or not this item of it."""


class TornStep(PdlibError):
    """A step is incomplete: a file of it is missing, cut short or unreadable."""


class ForeignLayout(PdlibError):
    """A step was written by another program or in an older layout."""


class Unreachable(PdlibError):
    """An object store did not answer, or refused to be read."""


class CorruptItem(PdlibError):
    """The bytes of an item are not the ones its manifest records."""


class StepRefused(PdlibError):
    """A save at this step would overwrite or fall behind what the directory holds."""


class ReadOnly(PdlibError):
    """Something that writes was asked of a manager opened for reading."""


class SaveFailed(PdlibError):
    """A save could not be written, at once or in the background; the cause is attached."""


class RunSpecError(PdlibError):
    """A run specification is unknown, malformed or has a bad value."""


class RunConflict(PdlibError):
    """A run directory belongs to another specification, or another process is at work in it."""


class Diverged(PdlibError):
    """A loss is no longer finite; names the term. The last good checkpoint is kept."""


class NoSuchSite(PdlibError):
    """A glob, mask or tap names no site, use or activation of the model; the text has near ones."""


class SiteRefused(PdlibError):
    """A weight that was selected cannot be decomposed; names each with its reason."""


class MaskMismatch(PdlibError):
    """Masks or factors do not fit the uses they are for; lists every difference at once."""


class BatchMismatch(PdlibError):
    """Parameters or batch are not shaped like those that the plan was made for."""
