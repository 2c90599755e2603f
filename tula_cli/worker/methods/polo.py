"""Method polo: post-local SGD (Lin et al. 2020): synchronous steps at first, then local steps of each rank with
periodic averaging."""

from tula_cli.optim.post_local_sgd import SWITCH_EPOCHS, average_replicas, is_average_due, synchronise_gradients
from tula_cli.worker.methods.plain import Loop, Plain
from tula_cli.worker.parallel.sharding import Replicated


class PostLocal(Plain):
    """Post-local SGD: the optimizer is unchanged; after the switch, weights are averaged in place of gradients."""

    def is_local(self, loop: Loop) -> bool:
        return loop.ranks.world > 1 and loop.position.epoch >= SWITCH_EPOCHS

    def before_backward(self, loop: Loop) -> None:
        """Average gradients over the ranks until the switch, and not afterwards."""
        if loop.ranks.world > 1:
            assert isinstance(loop.parallel, Replicated), "the spec refuses polo on shares"
            synchronise_gradients(loop.parallel, wanted=not self.is_local(loop))

    def after_step(self, loop: Loop) -> None:
        """Average the replicas if due; they differ after a local step until they are averaged."""
        if not self.is_local(loop):
            return
        loop.apart = True
        samples_done, size = loop.position.done, len(loop.datasets.train)
        remaining = loop.sizes.ramp.steps_of_epoch(loop.position.epoch, samples_done=samples_done, size=size)
        if is_average_due(
            samples_done, batch=loop.batch, end=samples_done + sum(batch * steps for batch, steps in remaining)
        ):
            self.join(loop)

    def join(self, loop: Loop) -> None:
        if not loop.apart:
            return
        average_replicas(loop.parallel.module, loop.base)
        if loop.scaler.is_enabled():  # each rank has found its own overflows
            state = loop.scaler.state_dict()
            scale, steps = loop.ranks.elementwise_max([-state["scale"], -state["_growth_tracker"]])
            loop.scaler.load_state_dict({**state, "scale": -scale, "_growth_tracker": int(-steps)})
        loop.apart = False

    def probe_epochs(self) -> int | None:
        return SWITCH_EPOCHS  # its synchronous steps: the more expensive ones

    def remarks(self, loop: Loop) -> list[str]:
        epochs = loop.spec.train.epochs
        if loop.ranks.world == 1:
            return ["post-local SGD on one GPU is plain SGD: there are no replicas to average"]
        if epochs <= SWITCH_EPOCHS:
            return [f"post-local SGD never leaves its {SWITCH_EPOCHS} synchronous epochs: train.epochs is {epochs}"]
        return []


METHOD = PostLocal()
