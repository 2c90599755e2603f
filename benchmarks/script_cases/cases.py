"""Third-party scripts, and a job for each: small enough for a CPU, with options that the scripts have."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from script_cases import data

IMAGE, SEARCH = (
    32,
    "strategy: full, min_steps: 8, min_seconds: 0, max_seconds: 4, max_minutes: 8, max_node_hours: 20",
)


@dataclass(frozen=True)
class Case:
    """An unchanged third-party script.

    `option` is the command-line option with the folder of a checkout, and `inside` its part that is copied and used as working folder.
    `{data}` in the job is a folder that `make` fills. `replace_gradients`: the script was written for CUDA and NCCL, and runs on the CPU.
    `own_steps`: it changes its weights without an optimizer of torch, so the ruler cannot time its steps.
    """

    name: str
    option: str
    inside: str
    job: str
    make: Callable[[Path, str], None]
    most_nodes: int = 2
    batches: tuple[int, int] = (16, 64)  # global: the smallest and the largest of three
    stand_in: bool = False
    saved: str = ""  # pattern of its checkpoints below {out}, or with a leading "./" below its folder
    environment: dict[str, str] = field(default_factory=dict)
    own_steps: bool = False


def _job(name: str, case_batches: tuple[int, int], nodes: int, script: str, train: str = "{method: lbt}") -> str:
    low, high = case_batches
    return (
        f"name: {name}\nscript:\n{script}train: {train}\n"
        f"search: {{nodes: {list(range(1, nodes + 1))}, min_batch: {low}, max_batch: {high}, {SEARCH}}}\ncluster: {{device: cpu}}\n"
    )


def _make_images(folder: Path, _: str) -> None:
    data.write_image_folder(folder)


TORCHVISION = """\
  command: train.py --data-path {{data}} --model resnet18 --device cpu -b {local_batch} --lr {lr} --epochs {epochs} -j {workers}
    --output-dir {out} --train-crop-size 32 --val-resize-size 36 --val-crop-size 32
  length: {epochs: 6}
  reference: {batch: 32, lr: 0.01}
  resume: {args: "--resume {checkpoint}", checkpoint: "{out}/checkpoint.pth", batch: epoch}
  metric: {top1: 'Acc@1 ([0-9.]+)'}
"""
TIMM = """\
  command: train.py {{data}} --model resnet18 --num-classes 8 --img-size 32 --device cpu -b {local_batch} --lr-base 0.05 --epochs {epochs}
    -j {workers} --seed {seed} --output {out} --experiment run --log-interval 1
  length: {epochs: 6}
  reference: {batch: 32}
  resume: {args: "--resume {checkpoint}", checkpoint: "{out}/run/last.pth.tar", batch: epoch}
  metric: {top1: 'Acc@1: +[0-9.]+ \\( *([0-9.]+)\\)'}
"""
NANOGPT = """\
  command: train.py --dataset=tula --dtype=float32 --compile=False --batch_size={micro_batch}
    --gradient_accumulation_steps={accumulate_total} --learning_rate={lr} --max_iters={steps} --lr_decay_iters={steps} --warmup_iters=2
    --block_size=64 --n_layer=2 --n_head=2 --n_embd=64 --eval_interval=20 --eval_iters=1 --log_interval=1 --always_save_checkpoint=True
    --out_dir={out}
  length: {steps: 120}
  dataset_size: 1400
  reference: {batch: 16, lr: 0.001}
  resume: {args: "--init_from=resume", checkpoint: "{out}/ckpt.pt", batch: any}
  metric: {val_loss: 'val loss ([0-9.]+)'}
"""
TRAINER = """\
  command: {start}run_clm.py --config_name {{data}} --tokenizer_name {{data}} --train_file {{data}}/text.txt --do_train --use_cpu
    {backend}--per_device_train_batch_size {micro_batch} --gradient_accumulation_steps {accumulate} --learning_rate {lr}
    --num_train_epochs {epochs} --block_size 32 --output_dir {out} --save_strategy epoch --report_to none --logging_steps 5
    --overwrite_cache
  length: {epochs: 3}
  reference: {batch: 64, lr: 0.001}
  resume: {args: "--resume_from_checkpoint {checkpoint}", checkpoint: "{out}/checkpoint-*", batch: same}
  metric: {loss: "'loss': '?([0-9.]+)"}
"""
LIGHTNING = """\
  command: torchrun --nnodes {nodes} --node-rank {node_rank} --nproc-per-node {gpus_per_node} --master-addr {master_addr}
    --master-port {master_port} backbone_image_classifier.py --trainer.accelerator cpu --trainer.strategy ddp --trainer.num_nodes {nodes}
    --trainer.devices {gpus_per_node} --data.batch_size {local_batch} --model.learning_rate {lr} --trainer.max_epochs {epochs}
    --trainer.default_root_dir {out} --trainer.enable_progress_bar false
  launch: node
  code: none
  length: {epochs: 2}
  reference: {batch: 1024, lr: 0.0001}
"""
IMAGENET = """\
  command: main.py {{data}} -a resnet18 -b {batch} --lr {lr} --epochs {epochs} -j {workers} -p 1 --no-accel
  length: {epochs: 3}
  reference: {batch: 16, lr: 0.01}
  resume: {args: "--resume {checkpoint}", checkpoint: "checkpoint.pth.tar", batch: epoch}
  metric: {top1: 'Acc@1 ([0-9.]+)'}
"""
WORDS = """\
  command: main.py --data {{data}} --batch_size {batch} --lr {lr} --epochs {epochs} --emsize 64 --nhid 64
  length: {epochs: 2}
  dataset_size: 2000
  reference: {batch: 16, lr: 1.0}
"""


def _make_lightning_mnist(folder: Path, _: str) -> None:
    """Fill the folder two levels above the script, where it reads the data, of which it splits 60,000 samples.

    PL_USE_MOCKED_MNIST makes it read Lightning's form of MNIST directly, without first trying to download torchvision's.
    """
    import torch

    place = folder.parents[1] / "Datasets" / "MNIST" / "complete"
    place.mkdir(parents=True, exist_ok=True)
    for name, number in (("training.pt", 60_000), ("test.pt", 500)):
        torch.save(
            (torch.randint(0, 256, (number, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (number,))), place / name
        )


def _make_words(folder: Path, _: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text(data.read_source_text(20_000))


def _make_tokens(folder: Path, _: str) -> None:
    data.write_tokens(folder.parent / "work" / "data" / "tula")


CASES = (
    Case(
        "torchvision", "torchvision", "references/classification", _job("torchvision", (16, 64), 2, TORCHVISION), _make_images,
        stand_in=True, saved="checkpoint.pth",
    ),
    Case("timm", "timm", "", _job("timm", (16, 64), 2, TIMM), _make_images, stand_in=True, saved="run/last.pth.tar"),
    Case("nanogpt", "nanogpt", "", _job("nanogpt", (8, 32), 2, NANOGPT, "{accumulate: 2}"), _make_tokens, 2, (8, 32), True, "ckpt.pt"),
    Case(
        "trainer", "transformers", "examples/pytorch/language-modeling",
        _job("trainer", (32, 128), 2, TRAINER.replace("{start}", "").replace("{backend}", "--ddp_backend gloo "), "{accumulate: 2}"), data.write_language_model, 2, (32, 128),
        saved="checkpoint-*",
    ),
    Case(
        "accelerate", "transformers", "examples/pytorch/language-modeling",
        _job(
            "accelerate", (32, 128), 2,
            TRAINER.replace("{backend}", "").replace(
                "{start}",
                "accelerate launch --cpu --num_processes {world} --num_machines {nodes} --machine_rank {node_rank}"
                " --main_process_ip {master_addr} --main_process_port {master_port} --mixed_precision no --dynamo_backend no"
                " --num_cpu_threads_per_process 1 ",
            ) + "  launch: node\n",
            "{accumulate: 2}",
        ), data.write_language_model, 2, (32, 128), saved="checkpoint-*",
    ),
    Case(
        "lightning", "lightning", "examples/pytorch/basics", _job("lightning", (512, 2048), 2, LIGHTNING), _make_lightning_mnist, 2, (512, 2048),
        saved="lightning_logs/version_*/checkpoints/*.ckpt", environment={"PL_USE_MOCKED_MNIST": "1"},
    ),
    Case("imagenet", "examples", "imagenet", _job("imagenet", (4, 16), 1, IMAGENET), _make_images, 1, (4, 16), saved="./checkpoint.pth.tar"),
    Case("words", "examples", "word_language_model", _job("words", (8, 32), 1, WORDS), _make_words, 1, (8, 32), own_steps=True),
)  # fmt: skip
