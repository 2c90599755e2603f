"""Models, losses and optimizers by name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.zoo import build_loss, build_model, build_optimizer


def spec(**sections) -> JobSpec:
    content = {
        "model": {"name": "small_cnn"},
        "dataset": {"name": "FakeData"},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 1},
    }
    return JobSpec.model_validate({**content, **sections})


def model(name: str, classes: int | None = 7, **args) -> nn.Module:
    return build_model(spec(model={"name": name, "args": args}), classes)


def optimizer(parameters=None, **section) -> torch.optim.Optimizer:
    tensors = [nn.Parameter(torch.ones(3))] if parameters is None else parameters
    return build_optimizer(spec(optimizer={"lr": 0.1, **section}), tensors)


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("user_zoo.py").write_text(
        "import torch\n"
        "def net(num_classes, depth=1):\n    return torch.nn.Linear(depth, num_classes)\n"
        "def plain():\n    return torch.nn.Linear(1, 1)\n"
        "def broken(num_classes):\n    return len(3)\n"
        "def no_module():\n    return 3\n"
        "def loss(output, target, weight=1.0):\n    return weight * output.sum()\n"
        "class Sgd(torch.optim.SGD):\n"
        "    def __init__(self, params, lr, **kwargs):\n        super().__init__(params, lr=lr, **kwargs)\n"
        "def bare(params, lr):\n    return torch.optim.SGD(params, lr=lr)\n",
        encoding="utf-8",
    )


# --- models


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "ResNet18", "mobilenet_v3_small"])
def test_number_of_classes_comes_from_the_dataset(name):
    assert model(name).eval()(torch.rand(2, 3, 32, 32)).shape == (2, 7)


def test_number_of_classes_of_the_arguments_wins():
    assert model("small_cnn", num_classes=3)(torch.rand(2, 3, 8, 8)).shape == (2, 3)


def test_unknown_number_of_classes_leaves_the_models_own():
    assert model("small_cnn", classes=None)(torch.rand(2, 3, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("size", [2, 8, 32, 33])
def test_small_cnn_takes_small_images_of_any_size_and_learns(size):
    network = model("small_cnn", in_channels=1, width=4)
    network(torch.rand(2, 1, size, size)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_width_widens_the_small_cnn():
    narrow, wide = (sum(p.numel() for p in model("small_cnn", width=width).parameters()) for width in (4, 8))
    assert wide > 3 * narrow


@pytest.mark.parametrize(
    ("name", "args", "words", "hint"),
    [
        ("resnet51", {}, "unknown model 'resnet51'", "resnet50"),
        ("smallcnn", {}, "unknown model", "small_cnn"),
        ("qqqq", {}, "unknown model", "package.module:callable"),
        ("mine.Net", {}, "unknown model", "mine:Net"),
        ("resnet18", {"norm_layr": None}, "model.args.norm_layr", "norm_layer"),
        ("small_cnn", {"widht": 4}, "model.args.widht", "width"),
        ("small_cnn", {"width": "wide"}, "does not accept", ""),
        ("small_cnn", {"width": -3}, "does not accept", ""),
        ("resnet18", {"weights": "NONE_SUCH"}, "does not accept", ""),
    ],
)
def test_wrong_model_is_named(name, args, words, hint):
    with pytest.raises(SpecError, match=words) as caught:
        model(name, **args)
    assert hint in caught.value.hint


def test_imported_model_gets_the_classes_where_it_names_them(user_code):
    assert model("user_zoo:net", depth=4).weight.shape == (7, 4)
    assert model("user_zoo:plain").weight.shape == (1, 1)


def test_wrong_arguments_of_an_imported_model_are_a_spec_error(user_code):
    with pytest.raises(SpecError, match=r"model\.args\.dept.*") as caught:
        model("user_zoo:net", dept=4)
    assert "depth" in caught.value.hint
    with pytest.raises(SpecError, match="needs 'num_classes'"):
        model("user_zoo:net", classes=None)


def test_error_inside_an_imported_model_is_its_own(user_code):
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        model("user_zoo:broken")


def test_imported_thing_that_is_no_module_is_refused(user_code):
    with pytest.raises(SpecError, match=r"is a int, not a torch\.nn\.Module"):
        model("user_zoo:no_module")


# --- losses


def test_cross_entropy_takes_its_arguments():
    loss = build_loss(spec(loss={"name": "cross_entropy", "args": {"label_smoothing": 0.1, "weight": [1.0, 2.0]}}))
    output, target = torch.tensor([[1.0, -1.0]]), torch.tensor([1])
    expected = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0]))(output, target)
    assert torch.equal(loss(output, target), expected)


def test_loss_of_torch_and_imported_loss(user_code):
    assert isinstance(build_loss(spec(loss={"name": "MSELoss"})), nn.MSELoss)
    imported = build_loss(spec(loss={"name": "user_zoo:loss", "args": {"weight": 3.0}}))
    assert imported(torch.ones(2), None) == 6
    assert build_loss(spec(loss={"name": "user_zoo:loss"}))(torch.ones(2), None) == 2


@pytest.mark.parametrize(
    ("section", "words"),
    [({"name": "crossentropy"}, "unknown loss"), ({"args": {"smoothing": 1}}, "loss.args.smoothing")],
)
def test_wrong_loss_is_named(section, words):
    with pytest.raises(SpecError, match=words):
        build_loss(spec(loss=section))


# --- optimizers


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_trains_matrices_and_leaves_the_rest_to_adamw():
    matrix, bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    trained = optimizer([matrix, bias], name="Muon")
    matrix.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    trained.step()
    assert matrix.abs().min() > 0 and bias.abs().min() > 0


def test_sgd_is_fused_and_carries_its_settings():
    result = optimizer(name="SGD", momentum=0.9, weight_decay=0.01, args={"nesterov": True})
    assert isinstance(result, torch.optim.SGD)
    expected = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True, "fused": True}
    assert {key: result.defaults[key] for key in expected} == expected


def test_sgd_without_a_fused_kernel_uses_foreach():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    result = optimizer([parameter], name="SGD")
    assert result.defaults["foreach"] is True
    parameter.grad = torch.ones_like(parameter)
    result.step()
    assert torch.allclose(parameter, torch.full_like(parameter, 0.9))


def test_choice_between_kernels_can_be_made_by_hand():
    result = optimizer(args={"foreach": False})
    assert result.defaults["foreach"] is False
    assert not result.defaults["fused"]


def test_sgd_without_momentum_keeps_no_state():
    parameter = nn.Parameter(torch.ones(3))
    result = optimizer([parameter])
    parameter.grad = torch.ones(3)
    result.step()
    assert torch.allclose(parameter, torch.full((3,), 0.9))


def test_weight_decay_of_the_spec_replaces_the_classes_own():
    assert optimizer(name="AdamW").defaults["weight_decay"] == 0
    assert optimizer(name="AdamW", weight_decay=0.3).defaults["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("section", "words", "hint"),
    [
        ({"name": "AdamW", "momentum": 0.9}, "AdamW has no argument momentum", "betas"),
        ({"name": "Rprop", "weight_decay": 0.1}, "Rprop has no argument weight_decay", "remove optimizer.weight_decay"),
        ({"name": "LBFGS"}, "LBFGS", ""),
        ({"name": "Adamw"}, "unknown optimizer", "AdamW"),
        ({"name": "Optimizer"}, "unknown optimizer", ""),
        ({"args": {"lr": 3}}, r"optimizer\.args\.lr", ""),
        ({"name": "Adam", "args": {"beta": 0.9}}, r"optimizer\.args\.beta", "betas"),
        ({"name": "Adam", "args": {"betas": [0.9, 2.0]}}, "does not accept", ""),
    ],
)
def test_wrong_optimizer_is_named(section, words, hint):
    with pytest.raises(SpecError, match=words) as caught:
        optimizer(**section)
    assert hint in caught.value.hint


def test_model_without_parameters_is_refused():
    with pytest.raises(SpecError, match="no parameters"):
        optimizer([])


def test_imported_optimizer_gets_what_it_takes(user_code):
    assert optimizer(name="user_zoo:Sgd", momentum=0.5).defaults["momentum"] == 0.5
    assert optimizer(name="user_zoo:bare").defaults["lr"] == 0.1
    with pytest.raises(SpecError, match="has no argument momentum"):
        optimizer(name="user_zoo:bare", momentum=0.5)


def test_muon_on_an_older_torch_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(
        SpecError, match=r"optimizer.name: torch.optim.Muon needs torch 2.9 or newer, but torch 2\."
    ) as error:
        optimizer(name="Muon")
    assert "AdamW" in error.value.hint


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"adamw": {"nonsense": 1}}, "nonsense"),
        ({"adamw": {"lr": -1}}, "Invalid learning rate"),
    ],
)
def test_arguments_of_muon_and_of_its_adamw_are_checked(args: dict, words: str) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    with pytest.raises(SpecError, match=words):
        optimizer(name="Muon", args=args)
