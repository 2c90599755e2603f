"""Results of the inspection of a job, and the jobs that it rejects."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from read_diagnostics import codes, values

from tula_cli.cluster import inspection
from tula_cli.cluster.inspection import NotInspectable, inspect, make_interpreter_error, parse_inspection
from tula_cli.errors import JobFailed, SpecError
from tula_cli.host import processes
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec
from tula_cli.worker.measure.inspect import inspect_job, inspect_job_from_json

ROOT = Path(__file__).parents[3]


def spec(**sections) -> JobSpec:
    """Return a tiny job whose sections are replaced as given."""
    content = {
        "model": {"name": "small_cnn", "args": {"width": 2}},
        "dataset": {"name": "FakeData", "args": {"size": 20, "image_size": [3, 8, 8]}},
        "optimizer": {"lr": 0.1, "momentum": 0.9},
        "train": {"epochs": 1},
        "search": {"nodes": [1, 2]},
    }
    return JobSpec.model_validate({**content, **sections})


def fake(size: int, *, classes: int = 10) -> dict:
    return {"name": "FakeData", "args": {"size": 8, "image_size": [3, size, size], "num_classes": classes}}


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    """Write a module of the user's into the working directory, under a name of its own."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text("import torch\nfrom torch import nn\n" + text, encoding="utf-8")

    return write


# --- what it tells


def test_dataset_model_and_memory_are_reported():
    result = inspect_job(spec())
    assert (result.dataset_size, result.eval_size, result.classes) == (20, 4, 10)
    assert result.sample_shape == (3, 8, 8)
    assert result.sample_bytes == 3 * 8 * 8 * 4 + 8  # float32, and an int64 label
    assert result.parameters == 3 * 2 * 9 + 2 * 2 * 9 + 2 * 4 * 9 + 4 * 4 * 9 + 2 * (2 + 2 + 4 + 4) + 4 * 10 + 10
    assert result.estimate_error == ""
    assert [row.local_batch for row in result.footprints] == [1, 2, 4, 8, 16, 32]
    assert result.footprints[-1].memory.peak > result.footprints[0].memory.peak
    assert result.process > 10**7
    assert result.device in ("cpu", "cuda")
    assert result.hardware
    assert result.cpus == len(os.sched_getaffinity(0))


PAPERS_JOBS = {
    "resnet50_imagenet": (256, 1000, 25_557_032),
    "vgg11_cifar100": (32, 100, 129_176_036),
    "alexnet_caltech101": (256, 101, 57_417_637),
    "mobilenetv3_caltech256": (256, 257, 4_531_249),
}


SHORTEST = "alexnet_caltech101"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SHORTEST else pytest.mark.proof) for name in PAPERS_JOBS]
)
def test_jobs_of_the_paper_are_sound_on_fake_data_of_their_size(name):
    pixels, classes, parameters = PAPERS_JOBS[name]
    job = load_spec(ROOT / "configs" / f"{name}.yaml", environ={}, site_files=())
    result = inspect_job(job.model_copy(update={"dataset": spec(dataset=fake(pixels, classes=classes)).dataset}))
    assert result.parameters == parameters
    assert result.sample_shape == (3, min(pixels, 224), min(pixels, 224))
    assert result.estimate_error == ""
    assert result.warnings == ()
    assert result.footprints[0].memory.gradients == 4 * parameters
    assert result.capacity == 32 * 10**9


@pytest.mark.parametrize("name", ["configs/quickstart.yaml", "templates/job.yaml"])
def test_shipped_local_jobs_are_sound(name):
    result = inspect_job(load_spec(ROOT / name, environ={}, site_files=()))
    assert (result.dataset_size, result.sample_shape, result.warnings) == (1438, (1, 8, 8), ())


def test_capacity_is_what_the_spec_says_else_a_share_of_the_machine():
    assert inspect_job(spec(cluster={"memory_per_gpu": 12345678})).capacity == 12345678
    assert inspect_job(spec(cluster={"kind": "slurm"})).capacity is None
    first, two = (inspect_job(spec(cluster={"device": "cpu", "gpus_per_node": gpus})).capacity for gpus in (1, 2))
    assert first == pytest.approx(2 * two, abs=1)
    assert first <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


def test_model_that_reads_its_numbers_is_checked_without_an_estimate(user_code):
    user_code(
        "reads_numbers",
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x.flatten(1))\n"
        "        return y if float(y.sum()) > 0 else 2 * y\n"
        "def build(num_classes):\n    return Net(192, num_classes)\n",
    )
    result = inspect_job(spec(model={"name": "reads_numbers:build"}))
    assert result.footprints == ()
    assert "DataDependent" in result.estimate_error
    assert result.parameters == 193 * 10


def test_more_outputs_than_classes_are_a_warning():
    result = inspect_job(spec(model={"name": "small_cnn", "args": {"num_classes": 12}}))
    counts = values(result.warnings, "more-outputs-than-classes")
    assert (counts["outputs"], counts["classes"]) == (12, 10)


def test_a_lightning_module_is_reported_that_its_own_step_is_not_called(user_code):
    user_code(
        "lit",
        "class Lit(nn.Sequential):\n"
        "    def __init__(self): super().__init__(nn.Flatten(), nn.Linear(192, 10))\n"
        "    def training_step(self, batch, number): raise AssertionError\n"
        "    def configure_optimizers(self): raise AssertionError\n",
    )
    assert "lightning-methods-not-called" in codes(inspect_job(spec(model={"name": "lit:Lit"})).warnings)
    assert "lightning-methods-not-called" not in codes(inspect_job(spec()).warnings)


def test_an_ordinary_network_has_no_warning():
    assert inspect_job(spec()).warnings == ()


def test_micro_batches_of_one_sample_are_a_warning_where_batch_norm_cannot():
    """ResNet's last stage of an 8 x 8 image is 1 x 1: one sample gives BatchNorm one number a channel."""
    result = inspect_job(spec(model={"name": "resnet18"}, search={"nodes": [1, 32]}))
    assert values(result.warnings, "batch-norm-on-single-sample") == {"min_batch": 64}
    assert inspect_job(spec(model={"name": "resnet18"})).warnings == ()


# --- what it refuses


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"name": "resnet51"}}, "unknown model"),
        ({"dataset": {"name": "CIFAR10", "root": "/nowhere"}}, "CIFAR10 is not in /nowhere"),
        ({"dataset": {"name": "ImageNet", "download": True}}, "cannot download ImageNet"),
        ({"transforms": {"train": ["RandomHorizontalFlip"]}}, "transforms.train returns Image"),
        ({"transforms": {"eval": ["ToImage"]}}, "transforms.eval returns a tensor of uint8"),
        ({"transforms": {"train": [{"RandomCrop": {"size": 20}}, "ToTensor"]}}, "cannot be transformed"),
        ({"transforms": {"train": ["ToTensor", {"Normalize": {"mean": [0, 0], "std": [1, 1]}}]}}, "cannot be transformed"),
        ({"model": {"name": "alexnet"}, "dataset": fake(32)}, r"alexnet cannot take inputs of shape \(3, 32, 32\)"),
        ({"model": {"name": "small_cnn", "args": {"in_channels": 1}}}, r"small_cnn cannot take inputs of shape \(3, 8, 8\)"),
        ({"model": {"name": "small_cnn", "args": {"num_classes": 4}}}, "has 4 outputs"),
        ({"model": {"name": "googlenet", "args": {"init_weights": False}}, "dataset": fake(64)}, "GoogLeNetOutputs"),
        ({"loss": {"name": "cross_entropy", "args": {"reduction": "none"}}}, "backward pass fails"),
        ({"optimizer": {"name": "AdamW", "lr": 0.1}, "train": {"epochs": 1, "method": "ags"},
          "ags": {"apply_to": "gradient"}}, "train.method ags: AdamW"),
        ({"optimizer": {"name": "AdamW", "lr": 0.1}, "train": {"epochs": 1, "method": "static"},
          "ags": {"apply_to": "gradient"}}, "method static: AdamW"),
        ({"optimizer": {"name": "Muon", "lr": 0.1}, "train": {"epochs": 1, "method": "ortho"}}, "method ortho: .*Muon"),
        ({"train": {"epochs": 1, "method": "lamb"}}, "method lamb replaces Adam or AdamW"),
        ({"optimizer": {"name": "SparseAdam", "lr": 0.1}}, "SparseAdam fails"),
        ({"model": {"name": "alexnet"}, "dataset": fake(64), "train": {"epochs": 1, "activation_checkpointing": True},
          "loss": {"name": "none"}}, "unknown loss"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_a_spec_error(sections, words):
    with pytest.raises(SpecError, match=words):
        inspect_job(spec(**sections))


def test_cuda_without_a_gpu_is_refused_here_but_not_for_slurm():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SpecError, match="no GPU"):
        inspect_job(spec(cluster={"device": "cuda"}))
    assert inspect_job(spec(cluster={"device": "cuda", "kind": "slurm"})).device == "cpu"


def test_images_of_different_sizes_are_refused(tmp_path):
    import PIL.Image

    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for index in range(4):
            PIL.Image.new("RGB", (10 + index, 9)).save(tmp_path / label / f"{index}.png")
    with pytest.raises(SpecError, match="different shapes") as caught:
        inspect_job(spec(dataset={"name": "ImageFolder", "root": str(tmp_path)}))
    assert "CenterCrop" in caught.value.hint


def test_adam_is_fine_without_gradient_scaling():
    result = inspect_job(spec(optimizer={"name": "AdamW", "lr": 0.1}, train={"epochs": 1, "method": "lbt"}))
    assert result.footprints[0].memory.optimizer > result.footprints[0].memory.gradients


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def build(num_classes):\n    raise KeyError('my key')\n", "KeyError: 'my key'"),
        ("import module_that_is_not_there\n", "module_that_is_not_there"),
        (
            "class build(nn.Module):\n"
            "    def __init__(self, num_classes):\n        super().__init__()\n        self.layer = nn.Linear(3, 3)\n"
            "    def forward(self, x):\n        return self.layer(x)\n",
            r"cannot take inputs of shape \(3, 8, 8\)",
        ),
    ],
)
def test_failing_code_of_the_user_is_a_failed_job_with_its_traceback(user_code, code, words, request):
    module = f"fails_{abs(hash(request.node.name))}"
    user_code(module, code)
    error = inspect_job_from_json(spec(model={"name": f"{module}:build"}).model_dump_json())["error"]
    assert error["class"] == "JobFailed"
    with pytest.raises(JobFailed, match=words):
        raise JobFailed(error["message"])
    assert module in error["detail"] or "Linear" in error["detail"]


def test_the_line_of_a_syntax_error_of_the_user_is_named(user_code):
    user_code("wrong_syntax", "x = 1\ndef build(:\n")
    error = inspect_job_from_json(spec(model={"name": "wrong_syntax:build"}).model_dump_json())["error"]
    assert "SyntaxError" in error["message"]
    assert error["hint"].startswith("correct ") and error["hint"].endswith(
        "wrong_syntax.py, line 4"
    )  # two lines precede the code


def test_failing_dataset_of_the_user_is_a_failed_job(user_code):
    user_code(
        "failing_data",
        "class Data:\n"
        "    def __init__(self, train, transform):\n        pass\n"
        "    def __len__(self):\n        return 5\n"
        "    def __getitem__(self, index):\n        raise OSError('disk on fire')\n",
    )
    with pytest.raises(JobFailed, match="disk on fire"):
        inspect_job(spec(dataset={"name": "failing_data:Data"}))


def test_spec_errors_keep_their_hint():
    error = inspect_job_from_json(spec(model={"name": "resnet51"}).model_dump_json())["error"]
    assert (error["class"], error["message"]) == ("SpecError", "unknown model 'resnet51'")
    assert "resnet50" in error["hint"]


# --- as a process


@pytest.mark.torch
def test_process_answers_one_object_whatever_the_users_code_prints(user_code, monkeypatch):
    user_code(
        "prints",
        "import os\nprint('hello from import')\n"
        "def build(num_classes):\n"
        "    print('hello from build')\n    os.write(1, b'and from below')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))\n",
    )
    printed = []

    def run_and_keep(*arguments, **options):
        printed.append(processes.run_command(*arguments, **options))
        return printed[0]

    monkeypatch.setattr(inspection, "run_command", run_and_keep)
    assert inspect(spec(model={"name": "prints:build"})).parameters == 1930
    begun, message = printed[0].stdout.splitlines()
    assert begun == "begun"
    assert Inspection.model_validate(json.loads(message)).dataset_size == 20
    assert "hello from build" in printed[0].stderr


@pytest.mark.torch
def test_launch_raises_the_error_of_the_inspection():
    with pytest.raises(SpecError, match="unknown model 'resnet51'"):
        inspect(spec(model={"name": "resnet51"}))


def test_an_interpreter_that_cannot_run_here_is_distinguished_from_a_model_that_ends_the_process():
    elsewhere = {"kind": "slurm", "python": "/nosuch/python"}
    with pytest.raises(NotInspectable, match=r"/nosuch/python cannot build .*No such file") as error:
        inspect(spec(cluster=elsewhere))
    assert "pip install 'tula-cli[torch]'" in error.value.hint
    assert error.value.hint.startswith(
        "run tula profile job.yaml, whose first job builds the model and the dataset on a node"
    )
    assert "tula profile" not in make_interpreter_error("python", "").hint, "as it was on the node already"
    message = "ModuleNotFoundError: No module named 'torch'\nsrun: error: node1: task 0: Exited with exit code 1"
    assert make_interpreter_error("python", message).message.endswith("No module named 'torch'")
    with pytest.raises(JobFailed, match="ended without a result: Segmentation fault"):
        parse_inspection("begun\n", "Segmentation fault")


# how an inspection ends that exceeds a limit of its machine: exit code, what it said, and the limit
LIMITS = [
    (137, "", "memory", "it was killed by SIGKILL"),
    (135, "", "memory", "it was killed by SIGBUS"),
    (152, "", "CPU time", "it was killed by SIGXCPU"),
    (1, "ImportError: libtorch_cpu.so: failed to map segment from shared object", "memory", "failed to map segment"),
    (1, "OSError: libc10.so: failed to map segment from shared object: Cannot allocate memory", "memory", "libc10.so"),
    (1, "ImportError: libgomp.so.1: cannot allocate memory in static TLS block", "memory", "static TLS block"),
    (
        134,
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "memory",
        "bad_alloc",
    ),
    (1, "MemoryError", "memory", "MemoryError"),
    (1, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array", "memory", "7.45 GiB"),
    (
        1,
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 32 bytes.",
        "memory",
        "can't allocate",
    ),
    (1, "OSError: [Errno 12] Cannot allocate memory", "memory", "Errno 12"),
    (1, "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.", "memory", "oom_kill"),
    (1, "bash: fork: retry: Resource temporarily unavailable", "processes and threads", "fork: retry"),
    (1, "RuntimeError: can't start new thread", "processes and threads", "can't start new thread"),
    (
        1,
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "processes and threads",
        "Thread creation",
    ),
    (
        139,
        "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 64",
        "processes and threads",
        "pthread_create",
    ),
]


@pytest.mark.parametrize(("code", "said", "name", "sign"), LIMITS)
@pytest.mark.parametrize("kind", ["local", "slurm"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_limit_of_the_machine_is_named_with_what_to_do(code, said, name, sign, kind, begun, monkeypatch):
    stdout = "begun\n" if begun else ""
    done = subprocess.CompletedProcess([], code, stdout, said)
    monkeypatch.setattr(inspection, "run_command", lambda *_, **__: done)
    with pytest.raises(NotInspectable) as error:
        inspect(spec(cluster={"kind": kind, "device": "cpu"} if kind == "local" else {"kind": kind}))
    assert f"the limit of {name} was exceeded" in error.value.message and sign in error.value.message
    assert "pip install" not in error.value.hint and re.search("raise the (memory )?limit", error.value.hint)
    assert error.value.hint.startswith("run tula profile job.yaml, whose first job") is (kind == "slurm")


@pytest.mark.parametrize(
    "said", ["KeyError: 'x'", "Segmentation fault", "ModuleNotFoundError: No module named 'torch'", ""]
)
def test_other_ends_of_an_inspection_are_no_limit(said, monkeypatch):
    done = subprocess.CompletedProcess([], 1, "begun\n", said)
    monkeypatch.setattr(inspection, "run_command", lambda *_, **__: done)
    with pytest.raises(JobFailed, match="ended without a result"):
        inspect(spec())


def test_every_unknown_name_is_reported_at_once():
    spec = JobSpec.model_validate(
        {
            "model": {"name": "resnt18"},
            "dataset": {"name": "CIFAR11"},
            "transforms": {"train": ["RandomCrp"]},
            "loss": {"name": "cross_entrpy"},
            "optimizer": {"name": "SGDD", "lr": 0.1},
            "train": {"epochs": 1},
        }
    )
    error = inspect_job_from_json(spec.model_dump_json())["error"]
    paths = [problem["path"] for problem in error["problems"]]
    assert paths == ["model.name", "dataset.name", "transforms.train", "loss", "optimizer"]
    assert "resnet18" in error["problems"][0]["hint"]
