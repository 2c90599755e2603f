"""The trainings of benchmarks/table1/table1.py as data: settings (a network, its data, optimizer and batches) and methods.

To add a method, add a row to METHODS and its name to the list of a family; to add a setting, add a row to SETTINGS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """One way to train a setting: its changes of the job, section by section."""

    train: Mapping[str, Any]
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    ags: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1.0  # factor of the setting's learning rate
    times: int | None = None  # the small batch that it ends at; None: the setting's large batch
    as_long_as_ramp: bool = False  # as many epochs as give the number of steps that `ramp: auto` takes
    same_tricks: str = ""  # the row of the small batch with the same steps and schedule


ORTHO = "small-ortho"
LATE = {"kind": "linear", "decay_from": 0.7}
BETA1 = {"args": {"betas": [0.8, 0.999]}}
TORCH_BETAS = {"args": {"betas": [0.9, 0.999]}}
NO_WARMUP = {"warmup_epochs": 0.0}

METHODS: Mapping[str, Method] = {
    "small": Method({"method": "lbt"}, times=1),
    "small-ortho": Method({"method": "ortho"}, schedule=NO_WARMUP, times=1),
    "small-ortho-late": Method({"method": "ortho"}, schedule=LATE | NO_WARMUP, times=1),
    "lbt": Method({"method": "lbt"}),
    "lbt-x4": Method({"method": "lbt"}, lr=4.0),
    "lbt-longer": Method({"method": "lbt"}, as_long_as_ramp=True),
    "lrs": Method({"method": "lrs"}),
    "sqrt": Method({"method": "lrs", "lr_scaling": "sqrt"}),
    "lars": Method({"method": "lars"}),
    "lamb": Method({"method": "lamb"}),
    "ags": Method({"method": "ags"}),
    "ags-8": Method({"method": "ags"}, ags={"b_small": 8}),
    "static": Method({"method": "static"}),
    "ramp-plain": Method({"method": "lrs", "ramp": "auto"}),
    "ramp-plain-sqrt": Method(
        {"method": "lrs", "ramp": "auto", "lr_scaling": "sqrt"}, optimizer={"beta2_half_life": "auto"}
    ),
    "ortho": Method({"method": "ortho"}, same_tricks=ORTHO),
    "ortho-late-beta1": Method(
        {"method": "ortho"}, optimizer=BETA1, schedule=LATE, same_tricks="small-ortho-late"
    ),
    "ramp": Method({"method": "ramp"}, same_tricks=ORTHO),
    "ramp-uncapped": Method({"method": "ramp", "max_lr_factor": None, "max_grad_norm": None}, same_tricks=ORTHO),
    "ramp-8": Method({"method": "ramp", "max_lr_factor": 8, "max_grad_norm": None}, same_tricks=ORTHO),
    "ramp-torch-betas": Method({"method": "ramp"}, optimizer=TORCH_BETAS, same_tricks=ORTHO),
    "ramp-late": Method({"method": "ramp"}, optimizer=TORCH_BETAS, schedule=LATE, same_tricks="small-ortho-late"),
    "ramp-late-beta1": Method({"method": "ramp"}, optimizer=BETA1, schedule=LATE, same_tricks="small-ortho-late"),
    "decay": Method({"method": "lbt", "ramp": "decay"}, times=8),
    "decay-ortho": Method({"method": "ramp", "ramp": "decay"}, times=8, same_tricks=ORTHO),
    "auto": Method({"method": "auto"}),
}  # fmt: skip
ADAMW = (
    "small", "lbt", "ramp", "small-ortho", "ortho", "ramp-plain-sqrt", "sqrt", "ramp-torch-betas", "ramp-late", "ramp-late-beta1", "decay",
    "decay-ortho", "lbt-x4", "ags", "small-ortho-late", "lbt-longer", "lamb", "ortho-late-beta1",
)  # fmt: skip
SGD = (
    "small", "lbt", "ramp", "ramp-uncapped", "ramp-8", "small-ortho", "ortho", "ramp-plain", "lrs", "decay", "lbt-x4", "ags",
    "lbt-longer", "lars", "auto",
)  # fmt: skip
PAPER = ("small", "lbt", "ags", "static", "lbt-x4", "lrs", "lars", "ramp", "ramp-uncapped", "ags-8")


@dataclass(frozen=True)
class Setting:
    """A job without method and seed, and its batches."""

    job: Mapping[str, Any]
    small: int  # batch that the learning rate is for
    large: int
    epochs: int
    methods: tuple[str, ...]
    family: str
    seeds: int = 2
    needs_images: bool = False  # of --data
    by_default: bool = True


def make_gpt_section(layers: int, width: int) -> dict[str, Any]:
    """Return a model section: GPT-2's architecture on bytes, without dropout."""
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": 32, "vocab_size": 256}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"name": "transformers:AutoModelForCausalLM", "args": {"model_type": "gpt2", **sizes, **dropout}}


def make_adamw_section(lr: float, weight_decay: float = 0.01) -> dict[str, Any]:
    """Return an optimizer section."""
    return {"name": "AdamW", "lr": lr, "weight_decay": weight_decay}


def make_sgd_section(lr: float, weight_decay: float = 5e-4) -> dict[str, Any]:
    """Return an optimizer section."""
    return {"lr": lr, "momentum": 0.9, "weight_decay": weight_decay}


COSINE = {"schedule": {"kind": "cosine"}}
CLIPPED = {"train": {"max_grad_norm": 1.0}}
TEXT: dict[str, Any] = (
    {"dataset": {"name": "python_source", "args": {"length": 32, "size": 100_000}}} | COSINE | CLIPPED
)
"""Bytes of Python's standard library."""
MULTISTEP = {"schedule": {"kind": "multistep"}}
"""Milestones at half and three quarters of the epochs, unless the setting names them."""
TABLE: dict[str, Any] = {
    "model": {"name": "table1_networks:table_mlp"},
    "dataset": {"name": "table1_networks:heavy_tailed_table"},
    "loss": {"name": "MSELoss"},
} | COSINE
PLACED_DIGITS = {"dataset": {"name": "table1_networks:placed_digits"}} | COSINE
DIGITS = {"dataset": {"name": "digits"}} | MULTISTEP
CIFAR = {"dataset": {"name": "table1_networks:dataset"}} | MULTISTEP
ALEXNET: dict[str, Any] = {
    "model": {"name": "table1_networks:small_alexnet"},
    "dataset": {"name": "digits"},
    "schedule": {"kind": "multistep", "milestones": [0.25, 0.5, 0.75]},
}


def make_text_setting(model: dict[str, Any], lr: float, *, seeds: int = 2) -> Setting:
    """Return a language model on bytes."""
    return Setting(
        {"model": model, "optimizer": make_adamw_section(lr), **TEXT}, 8, 128, 4, ADAMW, "AdamW", seeds=seeds
    )


def make_reduced_setting(batch_norm: bool, lr: float) -> Setting:
    """Return one network of the reduced Table I."""
    model = {"name": "table1_networks:SmallNet", "args": {"batch_norm": batch_norm}}
    job = {"model": model, "optimizer": make_sgd_section(lr), **CIFAR}
    return Setting(job, 128, 2048, 20, SGD, "SGD", needs_images=True)


def make_full_setting(model: str, lr: float, weight_decay: float, batch: int) -> Setting:
    """Return a network of Table I at full size, with the paper's learning rate for batch 128 (IV-B); for a GPU."""
    job = {"model": {"name": model}, "optimizer": make_sgd_section(lr, weight_decay), **CIFAR}
    return Setting(job, 128, batch, 30, SGD, "SGD", seeds=3, needs_images=True, by_default=False)


SETTINGS: dict[str, Setting] = {
    "text-small": make_text_setting(make_gpt_section(2, 48), 3e-3, seeds=3),
    "text": make_text_setting(make_gpt_section(3, 64), 3e-3, seeds=3),
    "vit": Setting(
        {
            "model": {"name": "table1_networks:SmallViT"},
            "dataset": {"name": "digits"},
            "optimizer": make_adamw_section(2e-3),
        }
        | COSINE,
        32, 512, 20, ADAMW, "AdamW",
    ),
    "lstm": make_text_setting({"name": "table1_networks:ByteLSTM"}, 0.012),
    "table-adamw": Setting(TABLE | {"optimizer": make_adamw_section(8e-3)}, 64, 1024, 10, ADAMW, "AdamW"),
    "resnet-gn": Setting(
        {"model": {"name": "table1_networks:resnet_gn"}, "optimizer": make_sgd_section(0.05), **PLACED_DIGITS}, 32, 512, 6,
        SGD, "SGD",
    ),
    "table-sgd": Setting(TABLE | {"optimizer": make_sgd_section(0.02, 1e-4)}, 64, 1024, 10, tuple(name for name in SGD if name != "ramp-8"),
        "SGD", seeds=3,  # whose limit is 8 in any case
    ),
    "digits": Setting(
        {"model": {"name": "small_cnn", "args": {"in_channels": 1, "width": 16}}, "optimizer": make_sgd_section(0.02), **DIGITS},
        32, 512, 15, SGD, "SGD", seeds=3,
    ),
    "reduced": make_reduced_setting(batch_norm=True, lr=0.05),
    "reduced-plain": make_reduced_setting(batch_norm=False, lr=0.01),
    "paper-256": Setting(ALEXNET | {"optimizer": make_sgd_section(0.01)}, 32, 256, 100, PAPER, "paper", seeds=3),
    "paper-512": Setting(ALEXNET | {"optimizer": make_sgd_section(0.01)}, 32, 512, 100, PAPER, "paper"),
    "paper-256-lr5": Setting(ALEXNET | {"optimizer": make_sgd_section(0.05)}, 32, 256, 100, PAPER, "paper"),
}  # fmt: skip
"""In the order in which they are trained: in each family, the first seed of all settings, then the second one."""
SETTINGS |= {
    f"{name.removesuffix('_cifar')}-{batch}": make_full_setting(name, lr, weight_decay, batch)
    for name, lr, weight_decay in (
        ("resnet18_cifar", 0.05, 5e-4),
        ("vgg11_cifar", 0.01, 5e-4),
        ("mobilenet_v3_large_cifar", 0.01, 1e-4),
        ("alexnet_cifar", 0.01, 5e-4),
        ("resnet50_cifar", 0.05, 5e-4),
    )
    for batch in (1024, 4096)
}


def count_steps_ratio(small: int, large: int) -> float:
    """Return the steps of `ramp: auto` per step of the large batch: it doubles the batch every 5 % of the training."""
    ratio, batch = 1.0, small
    while batch < large:
        ratio += 0.05 * (large / batch - 1)
        batch *= 2
    return ratio


def make_job_content(name: str, method: str, seed: int) -> dict[str, Any]:
    """Return the content of the job that trains a setting by a method."""
    setting, changes = SETTINGS[name], METHODS[method]
    ratio = count_steps_ratio(setting.small, setting.large) if changes.as_long_as_ramp else 1.0
    epochs = round(ratio * setting.epochs)
    content = {key: dict(section) for key, section in setting.job.items()}
    content["optimizer"] |= {**changes.optimizer, "lr": changes.lr * content["optimizer"]["lr"]}
    base = {} if "kind" in changes.schedule else content["schedule"]
    content["schedule"] = {**base, **changes.schedule}
    if content["schedule"]["kind"] == "multistep":
        shares = content["schedule"].get("milestones", (0.5, 0.75))
        content["schedule"]["milestones"] = [share * epochs for share in shares]
    if changes.ags:
        content["ags"] = dict(changes.ags)
    content["train"] = {
        **content.get("train", {}),
        **changes.train,
        "epochs": epochs,
        "seed": seed,
        "reference_batch": setting.small,
    }
    return {"name": f"table1-{name}", **content}


def choose_batch(name: str, method: str) -> int:
    """Return the batch with which a method trains a setting; for a growing batch, the final one."""
    setting, times = SETTINGS[name], METHODS[method].times
    return setting.large if times is None else times * setting.small
