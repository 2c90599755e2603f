"""AGS around an optimizer that somebody else steps, in one process: numbers, closures, checkpoints, and every refusal."""

import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tula_cli.cluster.scripts.methods import copy_optim
from tula_cli.optim import TulaOptimizer, configure_ags
from tula_cli.presets import AGS_PRESETS, NORMALISING_OPTIMIZERS
from tula_cli.run.records.scripts import AgsPlan, ShimPlan
from tula_cli.shim.tula_shim import ags as ags_module
from tula_cli.shim.tula_shim.ags import AgsHooks, CannotScaleError
from tula_cli.shim.tula_shim.ddp_split import DdpSplit
from tula_cli.shim.tula_shim.plan import PlanError, read_plan

pytestmark = pytest.mark.torch
Target = Any


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_optim(tmp_path_factory.mktemp("run"))


@pytest.fixture
def around(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AgsHooks]]:
    """Make AGS as the shim does, from a plan that is written."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(preset: str = "paper", **changes: Any) -> AgsHooks:
        settings = {**AGS_PRESETS[preset], "refresh": {"every": 1}}
        given = {
            "code": str(library), "settings": settings, "apply_to": None, "b_large": 8, "b_small": 2, "available": 8,
            "steps_per_epoch": 4, "seed": 0, "resumed": False, **changes,
        }  # fmt: skip
        plan = ShimPlan(task="t", folder=str(tmp_path), mode="train", ags=AgsPlan.model_validate(given))
        (tmp_path / "plan.json").write_text(plan.model_dump_json())
        return AgsHooks(read_plan(str(tmp_path / "plan.json")), DdpSplit())

    yield make


class Loop:
    """A training in one process, with AGS by hand, by hooks, or without."""

    def __init__(self, name: str = "SGD") -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        more = {"momentum": 0.9} if name == "SGD" else {}
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(self.net.parameters(), lr=0.1, **more)
        self.base = self.optimizer
        self.ags: AgsHooks | None = None

    def by_hand(self, target: Target) -> "Loop":
        made = configure_ags({**AGS_PRESETS["paper"], "refresh": {"every": 1}, "apply_to": target})
        self.optimizer = TulaOptimizer(self.base, model=self.net, b_large=8, b_small=2, **made)
        return self

    def around(self, ags: AgsHooks) -> "Loop":
        self.ags = ags
        ags.register_optimizer(self.base)
        ags.register_model(self.base, self.net)
        self.base.register_step_pre_hook(ags.before_step)
        self.base.register_step_post_hook(lambda optimizer, *_: ags.after_step(optimizer))
        return self

    def train(self, steps: range, *, closure: bool = False) -> "Loop":
        for step in steps:
            self.optimizer.zero_grad()
            if closure:
                self.optimizer.step(lambda step=step: self._backward(step))
            else:
                self._backward(step)
                self.optimizer.step()
        return self

    def _backward(self, step: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=made), torch.randint(3, (8,), generator=made)

        def loss_of(n: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(x[:n]), y[:n])

        loss = loss_of(8)
        loss.backward()
        if self.ags is not None:
            self.ags.compute_small_batch_gradient(loss_of)
        elif isinstance(self.optimizer, TulaOptimizer) and self.optimizer.needs_small_batch:
            self.optimizer.small_batch(loss_of)
        return loss

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])


@pytest.mark.parametrize(("name", "target"), [("SGD", "gradient"), ("AdamW", "update")])
@pytest.mark.parametrize("closure", [False, True])
def test_the_papers_elementwise_form_through_the_hooks_is_the_librarys(
    around: Callable[..., AgsHooks], name: str, target: Target, closure: bool
) -> None:
    value = Loop(name).around(around()).train(range(5), closure=closure)
    assert torch.equal(value.weights, Loop(name).by_hand(target).train(range(5)).weights)
    assert not torch.allclose(value.weights, Loop(name).train(range(5)).weights, atol=1e-4)
    assert value.ags is not None
    so_far = value.ags.report()["ags"]["so_far"]
    assert (so_far["apply_to"], so_far["steps"]) == (target, 5) and 0 < so_far["scaled"] < 1
    assert value.ags.report()["ags"]["so_far"] == so_far, "no step since"
    last = value.train(range(5, 6)).ags.report()["ags"]
    assert (last["steps"], last["so_far"]["steps"]) == (1, 6)


def test_what_a_checkpoint_of_the_optimizer_holds_goes_on_exactly(
    around: Callable[..., AgsHooks], tmp_path: Path
) -> None:
    first = Loop().around(around()).train(range(3))
    torch.save({"model": first.net.state_dict(), "optimizer": first.base.state_dict()}, tmp_path / "last.pt")
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    again = Loop()
    ags = around(resumed=True)
    ags.register_optimizer(again.base)
    again.net.load_state_dict(state["model"])
    again.base.load_state_dict(state["optimizer"])  # before there is anything around it
    again.ags = None
    again.around(ags).train(range(3, 6))
    assert torch.equal(again.weights, first.train(range(3, 6)).weights)
    assert list(ags.pop_notes()) == []
    plain = Loop()
    plain.base.load_state_dict(state["optimizer"])  # without tula, what is more is left out
    assert plain.base.state_dict().keys() == {"state", "param_groups"}


def test_a_checkpoint_without_the_optimizer_is_reported_and_another_batch_begins_anew(
    around: Callable[..., AgsHooks],
) -> None:
    first = Loop().around(around()).train(range(3))
    silent = around(resumed=True)
    Loop().around(silent)
    assert ["factors start again at 1" in text for text in silent.pop_notes()] == [True]
    smaller = around(b_large=4, available=4)
    again = Loop().around(smaller)
    again.base.load_state_dict(first.base.state_dict())
    assert smaller.tula is not None and not smaller.tula.factors.has_factors and smaller.tula._n_steps == 3


def test_a_state_of_another_version_is_refused(around: Callable[..., AgsHooks]) -> None:
    value = Loop().around(around()).train(range(2))
    state = value.base.state_dict()
    state["tula_ags"]["version"] = 1
    with pytest.raises(CannotScaleError, match=r"format 1.*another version of tula"):
        value.base.load_state_dict(state)


def test_a_step_that_an_error_breaks_off_is_none(around: Callable[..., AgsHooks]) -> None:
    value = Loop("AdamW").around(around()).train(range(2))
    kept = value.weights
    value._backward(2)
    assert value.ags is not None and value.ags.tula is not None
    value.ags.before_step(value.base, (value.base,), {})  # the step itself fails, and the script takes the next batch
    assert torch.equal(value.weights, kept) and value.ags.tula._n_steps == 2
    value.train(range(3, 5))
    assert value.ags.tula._n_steps == 4


def told(folder: Path) -> str:
    (path,) = folder.glob("failure-*.json")
    failure = json.loads(path.read_text())
    assert failure["where"] == "method" and failure["error"].endswith("CannotScaleError")
    return str(failure["text"])


def test_one_process_alone_is_refused_and_goes_on_being_so(around: Callable[..., AgsHooks], tmp_path: Path) -> None:
    loop, ags = Loop(), around("robust")
    ags.register_optimizer(loop.base)
    loop.base.register_step_pre_hook(ags.before_step)
    loop.base.register_step_post_hook(lambda optimizer, *_: ags.after_step(optimizer))
    with pytest.raises(CannotScaleError, match=r"there is no other gradient.*otherwise use train.method lbt"):
        loop.train(range(9))
    assert "there is no other gradient" in told(tmp_path)
    with pytest.raises(CannotScaleError):
        loop.train(range(1))  # a script that catches it trains no step more


def test_a_loop_that_offers_no_small_batch_is_refused(around: Callable[..., AgsHooks]) -> None:
    for preset, words in (("robust", "there is no other"), ("paper", "needs tula_hooks.small_batch")):
        loop, ags = Loop(), around(preset)
        loop.around(ags).ags = None
        with pytest.raises(CannotScaleError, match=words):
            loop.train(range(1))


class Fused(torch.optim.SGD):
    """Tells a GradScaler that it unscales by itself."""

    _step_supports_amp_scaling = True


def test_a_fused_step_lets_the_scaler_unscale_first(around: Callable[..., AgsHooks]) -> None:
    loop = Loop()
    loop.base = loop.optimizer = Fused(loop.net.parameters(), lr=0.1)
    loop.around(around())
    assert loop.base._step_supports_amp_scaling is False  # type: ignore[attr-defined]


class Prodigy(torch.optim.Optimizer):
    """One that nobody has heard of."""


class SGDW(torch.optim.SGD):
    """One of SGD's kind."""


@pytest.mark.parametrize(
    ("kind", "gradients"), [(torch.optim.SGD, True), (SGDW, True), (torch.optim.AdamW, False), (Prodigy, False)]
)
def test_gradients_are_scaled_where_that_is_known_to_act_else_updates(kind: Any, gradients: bool) -> None:
    assert ags_module.can_scale_gradients(kind.__new__(kind), NORMALISING_OPTIMIZERS) is gradients


def test_gradients_of_adam_are_refused(around: Callable[..., AgsHooks]) -> None:
    with pytest.raises(CannotScaleError, match="divides by the magnitude of the gradient"):
        Loop("Adam").around(around(apply_to="gradient"))


def test_no_optimizer_of_torch_is_refused(around: Callable[..., AgsHooks]) -> None:
    with pytest.raises(CannotScaleError, match=r"builtins.object is not a torch optimizer"):
        around().register_model(object(), nn.Linear(1, 1))


def test_an_optimizer_within_a_trainers_is_meant(around: Callable[..., AgsHooks]) -> None:
    loop, ags = Loop(), around()

    class Prepared:
        optimizer = loop.base

    ags.register_model(Prepared(), loop.net)
    assert ags.tula is not None and ags.tula.base is loop.base


@pytest.mark.parametrize("versions", [((99, 0), (2, 6)), ((3, 10), (99, 0))], ids=["python", "torch"])
def test_a_python_or_torch_that_is_too_old_is_refused_with_both(
    around: Callable[..., AgsHooks], monkeypatch: pytest.MonkeyPatch, versions: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    monkeypatch.setattr(ags_module, "LEAST_PYTHON", versions[0])
    monkeypatch.setattr(ags_module, "LEAST_TORCH", versions[1])
    python = ".".join(str(part) for part in sys.version_info[:2])
    with pytest.raises(CannotScaleError, match=rf"needs Python .* the script runs Python {python}.* torch 2\."):
        Loop().around(around())


class Ddp(nn.Module):
    """Has the place of a DistributedDataParallel among those that are known."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_communication_hook_of_the_scripts_own_is_refused_by_name(around: Callable[..., AgsHooks]) -> None:
    loop, ags = Loop(), around("robust")
    model = Ddp(loop.net)
    ags.split.modules.append(weakref.ref(model))
    ags.split._hooked.add(id(model))
    ags.split.hook = "fp16_compress_hook"
    ags.register_optimizer(loop.base)
    with pytest.raises(CannotScaleError, match=r"own communication hook \(fp16_compress_hook\).*source: small_batch"):
        ags.bind_largest_model()


def test_an_optimizer_of_other_parameters_is_refused(around: Callable[..., AgsHooks]) -> None:
    loop, ags = Loop(), around()
    model = Ddp(nn.Linear(2, 2))
    ags.split.modules.append(weakref.ref(model))
    ags.register_optimizer(loop.base)
    ags.bind_largest_model()
    with pytest.raises(CannotScaleError, match="no optimizer updates parameters of the model"):
        for _ in range(ags_module.MAX_INITIAL_STEPS_WITHOUT_AGS):
            ags.after_step(loop.base)


def test_of_several_the_largest_model_and_optimizer_are_meant(around: Callable[..., AgsHooks]) -> None:
    loop, ags = Loop(), around()
    other = nn.Linear(2, 2)
    models = [Ddp(other), Ddp(loop.net)]
    ags.split.modules += [weakref.ref(model) for model in models]
    small = torch.optim.SGD(list(loop.net[0].parameters()), lr=0.1)  # type: ignore[arg-type]
    for optimizer in (torch.optim.SGD(other.parameters(), lr=0.1), small, loop.base):
        ags.register_optimizer(optimizer)
    ags.bind_largest_model()
    assert ags.tula is not None and ags.tula.base is loop.base and ags.tula.setup.model is models[1]
    assert not [text for text in ags.pop_notes() if "not scaled" in text], "its parameters are the same"


def test_what_smaller_optimizers_of_the_model_train_is_reported_to_be_unscaled(around: Callable[..., AgsHooks]) -> None:
    loop, ags = Loop(), around()
    ags.split.modules.append(weakref.ref(model := Ddp(loop.net)))
    head = torch.optim.AdamW(list(loop.net[2].parameters()), lr=0.1)  # type: ignore[arg-type]
    body = torch.optim.SGD(list(loop.net[0].parameters()), lr=0.1)  # type: ignore[arg-type]
    critic = torch.optim.RMSprop(torch.nn.Linear(2, 2).parameters(), lr=0.1)  # of a smaller model, as a GAN's
    for optimizer in (head, body, critic):
        ags.register_optimizer(optimizer)
    ags.bind_largest_model()
    assert ags.tula is not None and (ags.tula.base, ags.tula.setup.model) == (body, model)
    messages = [text for text in ags.pop_notes() if "not scaled" in text]
    assert (
        len(messages) == 1
        and "the 56 parameters of torch.optim.sgd.SGD" in messages[0]
        and "AdamW (27 parameters)" in messages[0]
    )
    assert "RMSprop (6 parameters)" in messages[0] and "of the largest model (" in messages[0]


def test_gradients_that_are_reduced_twice_a_step_are_refused(around: Callable[..., AgsHooks]) -> None:
    value = Loop().around(around())
    assert value.ags is not None
    value.ags.rounds = 2
    with pytest.raises(CannotScaleError, match="reduces its gradients 2 times per step"):
        value.train(range(1))
    scaled = Loop().around(around())
    assert scaled.ags is not None
    scaled.ags.rounds = 1
    scaled.ags.discard_skipped_step()  # by a GradScaler: those of the skipped step do not count
    scaled.train(range(1))


def test_another_optimizer_that_takes_over_is_refused(around: Callable[..., AgsHooks]) -> None:
    value, other = Loop().around(around()).train(range(1)), Loop()
    assert value.ags is not None
    with pytest.raises(CannotScaleError, match=r"but the script steps torch.optim.sgd.SGD"):
        for _ in range(ags_module.MAX_STEPS_WITHOUT_AGS + 1):
            value.ags.after_step(other.base)


@pytest.mark.parametrize("ags", [{"code": "/x"}, [], "yes"])
def test_a_plan_with_a_part_of_it_cannot_be_followed(tmp_path: Path, ags: object) -> None:
    plan = {"version": 1, "task": "t", "folder": str(tmp_path), "ags": ags}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="ags is"):
        read_plan(str(tmp_path / "plan.json"))


def test_the_copy_is_a_package_of_its_own_that_needs_nothing_of_tula(library: Path) -> None:
    assert [path.name for path in library.iterdir()] == ["tula_ags"]
    assert library.name.startswith("ags-") and copy_optim(library.parents[1]) == library
    code = {path: path.read_text() for path in library.rglob("*.py")}
    assert {"__init__.py", "ags.py", "orthogonal.py", "presets.py"} <= {path.name for path in code}
    assert not [path for path, text in code.items() if "import tula_cli" in text or "from tula_cli" in text]
