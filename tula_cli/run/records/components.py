"""What the memory of one rank consists of: Eq. 3 of the paper, M_total = M_param + M_grad + M_opt + M_act + M_batch."""

from tula_cli.run.records.base import Count, Record


class ModelStates(Record):
    """The terms of Eq. 3 that no batch changes: ZeRO's model states, and the factors of AGS. Bytes."""

    parameters: Count  # and buffers
    gradients: Count
    optimizer: Count  # its state
    factors: Count  # AGS scaling factors; the paper leaves them out

    @property
    def static(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.factors


class Components(ModelStates):
    """Eq. 3 of one rank at the peak of a step, and what its allocator and its libraries take. Bytes."""

    batch: Count  # inputs and targets of one micro-batch
    activations: Count  # and workspaces: the peak less all of the above
    peak: Count  # in use at a time
    reserved: Count  # what the allocator holds for that where it has room (CUDA); the peak on the CPU
    # What takes from the capacity beside that: on a GPU the context, cuBLAS and NCCL; on the CPU what the process held
    # before, and under a limit only the part that the limit counts.
    libraries: Count = 0


class PeakMemory(Record):
    """The peak of one rank where nothing tells what it consists of, as of a script of the user's own. Bytes."""

    # Counted from the tensors that its optimizer holds; None where it has none. What the rest of the peak is (activations,
    # batch, workspaces; on the CPU the process itself) is not known apart.
    states: ModelStates | None
    peak: Count  # in use at a time; on the CPU what was resident
    reserved: Count  # as of Components
    libraries: Count | None = None  # as of Components, beside the peak; None where it was not measured


class Footprint(Record):
    """Eq. 3 at one local batch, estimated without a GPU."""

    local_batch: Count
    memory: Components
    room: Count = 0  # bytes: the least that a GPU's allocator gets by with; 0 where that was not simulated
