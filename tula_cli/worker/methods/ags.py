"""Method ags: adaptive gradient scaling, Algorithm 1 of the paper."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.models.refresh import compute_small_batch_size
from tula_cli.optim import TulaOptimizer, configure_ags
from tula_cli.optim.ags import AgsArguments, IdentityWarning, count_samples_per_rank, find_embeddings
from tula_cli.spec.ags import Ags
from tula_cli.spec.job import JobSpec
from tula_cli.worker import messages
from tula_cli.worker.build.parameter_groups import find_parameters
from tula_cli.worker.methods.plain import Configuration, Loop, Memory, Plain
from tula_cli.worker.parallel.sharding import Parallel


def compute_small_batch_limit(configuration: Configuration) -> int:
    """Return the most samples that a rank can use for AGS's small batch: one micro-batch (rounded down)."""
    return configuration.batch // configuration.world // configuration.spec.train.accumulate


def list_excluded_parameters(model: nn.Module, ags: Ags) -> Iterable[nn.Parameter]:
    """Return the parameters that `ags.parameters` leaves unscaled.

    Raises:
        SpecError: a pattern matches no parameter of the model.
    """
    if isinstance(ags.parameters, str):
        return find_embeddings(model) if ags.parameters == "auto" else ()
    scaled = find_parameters(model, ags.parameters, path="ags.parameters")
    return {parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name not in scaled}


class Scaling(Plain):
    """Wraps the optimizer in a TulaOptimizer, configured by the section `ags`."""

    def make_arguments(self, ags: Ags, **changed: Any) -> AgsArguments:
        """Return new arguments for a TulaOptimizer; `changed` overrides settings of the section `ags`."""
        return configure_ags(ags.fill_from_preset().model_dump() | changed)

    def wrap_optimizer(
        self, base: torch.optim.Optimizer, parallel: Parallel, configuration: Configuration
    ) -> torch.optim.Optimizer:
        spec, batch = configuration.spec, configuration.batch
        # A probe requests refreshes itself, unless every step refreshes and a refresh is part of the step time.
        by_itself = configuration.refresh or spec.ags.fill_from_preset().refreshes_each_step
        arguments = self.make_arguments(spec.ags, **({} if by_itself else {"refresh": "epoch"}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IdentityWarning)  # `list_remarks` reports it
            return TulaOptimizer(
                base,
                model=parallel,
                b_large=batch,
                b_small=compute_small_batch_size(spec, batch),
                **arguments,
                max_grad_norm=spec.train.max_grad_norm,
                available=compute_small_batch_limit(configuration),
                seed=spec.train.seed,
                exclude=list_excluded_parameters(parallel.module, spec.ags),
            )

    def check_optimizer(self, spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        b_small = spec.requested_small_batch
        arguments = self.make_arguments(spec.ags)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", IdentityWarning)  # `list_remarks` reports it
                TulaOptimizer(
                    optimizer,
                    model=model,
                    b_large=4 * b_small,  # any batch at which AGS has an effect
                    b_small=b_small,
                    **arguments,
                    max_grad_norm=spec.train.max_grad_norm,
                    exclude=list_excluded_parameters(model, spec.ags),
                )
        except ValueError as error:
            raise SpecError(
                f"train.method {spec.train.method}: {error}",
                "set ags.apply_to: update, train.method: lbt, or optimizer.name: SGD",
            ) from error

    def count_small_batch_samples_per_rank(self, configuration: Configuration) -> Sequence[int]:
        """Return the number of samples that each rank contributes to a small batch; empty if none is taken."""
        spec, world = configuration.spec, configuration.world
        if not _needs_small_batch(spec, several=world > 1):
            return ()
        return count_samples_per_rank(
            compute_small_batch_size(spec, configuration.batch), compute_small_batch_limit(configuration), world, 0
        )

    def compute_min_samples(self, configuration: Configuration) -> int:
        if compute_small_batch_size(configuration.spec, configuration.batch) >= configuration.batch:
            return 1  # nothing is scaled
        return max(self.count_small_batch_samples_per_rank(configuration), default=1)

    def estimate_memory(self, spec: JobSpec, parameters: Sequence[nn.Parameter], *, several: bool) -> Memory:
        copied = parameters if spec.ags.fill_from_preset().apply_to == "update" else ()
        return Memory(factors=True, small_batch=_needs_small_batch(spec, several=several), before=copied, after=True)

    def get_scaling_optimizer(self, optimizer: torch.optim.Optimizer) -> TulaOptimizer | None:
        return optimizer if isinstance(optimizer, TulaOptimizer) else None

    def change_batch(self, loop: Loop) -> None:
        ags, spec = self.get_scaling_optimizer(loop.optimizer), loop.spec
        assert ags is not None
        configuration = Configuration(spec, loop.batch, loop.ranks.world)
        ags.change_batch(
            b_large=configuration.batch,
            b_small=compute_small_batch_size(spec, configuration.batch),
            available=compute_small_batch_limit(configuration),
        )

    def refresh(self, loop: Loop, small_loss: Callable[[int], Tensor]) -> bool:
        """Compare the gradient of a small batch with that of the large one, when Algorithm 1 requires it (line 10)."""
        ags = self.get_scaling_optimizer(loop.optimizer)
        if ags is None or not ags.needs_small_batch:
            return False
        ags.small_batch(small_loss, scaler=loop.scaler)
        return not loop.spec.ags.fill_from_preset().refreshes_each_step

    def list_remarks(self, loop: Loop) -> list[Diagnostic]:
        """Return a remark if AGS is the identity, or uses a small batch of another size than configured."""
        ags = self.get_scaling_optimizer(loop.optimizer)
        assert ags is not None
        if loop.batch < loop.sizes.batch:
            return []  # a stage below the target batch: AGS may have an effect at later stages
        if ags.identity:
            return [messages.ags_without_effect(reason=ags.identity)]
        setup = ags.setup
        if setup.small_batch_size == setup.b_small or not ags.factors.reads_b_small:
            return []
        return [
            messages.small_batch_reduced(
                small_batch=setup.small_batch_size, b_small=setup.b_small, accumulate=loop.spec.train.accumulate
            )
        ]


def _needs_small_batch(spec: JobSpec, *, several: bool) -> bool:
    """Return whether a small batch's gradient is needed; several ranks can do without it (source local_norms)."""
    return not (several and spec.ags.fill_from_preset().source == "local_norms")


METHOD = Scaling
