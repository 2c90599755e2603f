"""The golden cases: a command line, or Python code with the public API, and the recorded run that it uses."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One command on one run.

    Args:
        name: `COMMAND-TOPIC`.
        run: name of a recorded run; empty for none.
        words: the command line.
        code: Python code instead of a command line; it prints JSON.
        edit: changes the folder before the command.
        shows: patterns of files written by the command, which are compared too.
        slurm: a fake SLURM is on PATH, which knows the jobs of the recorded run.
        slow: runs only in `make proof`.
        package: the optional package of the command.
    """

    name: str
    run: str = ""
    words: str = ""
    code: str = ""
    edit: Callable[[Path], None] | None = None
    shows: tuple[str, ...] = ()
    slurm: bool = False
    slow: bool = False
    package: str = ""


# --- changes of recorded runs


def find_first(folder: Path, pattern: str) -> Path:
    return min(folder.glob(f"tula-runs/*/{pattern}"))


def truncate_file(pattern: str) -> Callable[[Path], None]:
    """Return an edit that truncates the first file that matches a pattern to half its size."""

    def edit(folder: Path) -> None:
        path = find_first(folder, pattern)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    return edit


def remove_files(*patterns: str) -> Callable[[Path], None]:
    """Return an edit that removes files of a run."""

    def edit(folder: Path) -> None:
        for pattern in patterns:
            for path in list(folder.glob(f"tula-runs/*/{pattern}")):
                path.unlink()

    return edit


def set_later_format(folder: Path) -> None:
    find_first(folder, "format").write_text("99 tula 7.0.0\n")


def with_job(**changes: object) -> Callable[[Path], None]:
    """Return an edit that writes job.yaml: the job `trained` with changed sections; sections that are None are removed."""

    def edit(folder: Path) -> None:
        lines = []
        text = (folder / "trained.yaml").read_text()
        for section in ("\n" + text).split("\n"):
            if section and not section.startswith(" "):
                lines.append([section.partition(":")[0], section])
            elif section:
                lines[-1][1] += f"\n{section}"
        sections = dict(lines) | {name: f"{name}: {json.dumps(value)}" for name, value in changes.items()}
        (folder / "job.yaml").write_text(
            "".join(f"{text}\n" for name, text in sections.items() if changes.get(name, 0) is not None)
        )

    return edit


def write_file(name: str, text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_text(text)

    return edit


def with_second_job(folder: Path) -> None:
    """Copy the only run as a run of another job, `second`, which has fewer epochs."""
    run = next(path for path in (folder / "tula-runs").iterdir() if not path.is_symlink() and path.is_dir())
    second = run.with_name("second-0a1b2c3d")
    shutil.copytree(run, second, symlinks=True)
    settings = (second / "spec.yaml").read_text()
    settings = settings.replace(f"name: {run.name.rpartition('-')[0]}\n", "name: second\n", 1)
    (second / "spec.yaml").write_text(settings.replace("epochs: 30\n", "epochs: 10\n", 1))


# --- output of Python code

PRINT_CODE = """
import json, math, warnings
import tula_cli as tula
warnings.simplefilter("ignore")
def show(value):
    print(json.dumps(value, default=str))
def rows(frame):
    return json.loads(frame.to_json(orient="records", double_precision=15))
"""
FAILING_CODE = """
try:
    {call}
    show("no error")
except tula.TulaError as error:
    show({{"class": type(error).__name__, "exit_code": error.exit_code, "message": error.message, "hint": error.hint, "problems": [str(p) for p in getattr(error, "problems", ())]}})
"""


def make_python_case(name: str, run: str, code: str, **options: object) -> Case:
    return Case(name, run, code=PRINT_CODE + code, **options)  # type: ignore[arg-type]


def make_failing_case(name: str, run: str, call: str) -> Case:
    return make_python_case(name, run, FAILING_CODE.format(call=call))


SLURM_JOB = {
    "kind": "slurm",
    "device": "cpu",
    "gpus_per_node": 2,
    "minutes": 30,
    "slurm": {"partition": "main", "extra": {"mail-type": "END"}},
}

CASES = (
    # --- without a run
    Case("tula-version", words="--version"),
    Case("tula-unknown-command", words="profil"),
    Case("tula-unknown-option", words="status --jsn"),
    Case("tula-no-command"),
    Case("init-local", words="init --json", shows=("job.yaml",)),
    Case("init-slurm", words="init slurm -o slurm.yaml --json", shows=("slurm.yaml",)),
    Case("init-exists", words="init --json", edit=write_file("job.yaml", "name: mine\n")),
    Case("init-from-command", words="init --from-command 'own_train.py --batch 8 --lr 0.1 --epochs 3' --json", shows=("job.yaml",)),
    Case("check-job", words="check trained.yaml --json"),
    Case("check-origin", words="check trained.yaml --show-origin --offline --json --set train.epochs=7"),
    Case("check-slurm", words="check job.yaml --offline --json", edit=with_job(cluster=SLURM_JOB), slurm=True),
    Case("check-script", words="check script.yaml --json"),
    Case("check-types", words="check types.yaml --json --offline"),
    Case("check-missing-file", words="check nowhere.yaml --json"),
    Case("check-no-yaml", words="check job.yaml --json", edit=write_file("job.yaml", "name: [1, 2\n")),
    Case("check-unknown-key", words="check job.yaml --json --offline", edit=with_job(trian={"epochs": 2})),
    Case("check-many-problems", words="check job.yaml --json --offline", edit=with_job(train={"epochs": 0, "precision": "fp8", "metod": "ags"}, optimizer={"name": "SGD"})),
    Case("check-bad-set", words="check trained.yaml --json --offline --set train.epochs=many"),
    Case("check-no-such-model", words="check job.yaml --json", edit=with_job(model={"name": "tiny:nett"}), slow=True),
    Case("check-model-fails", words="check job.yaml --json", edit=with_job(model={"name": "tiny:net", "args": {"width": 3}}), slow=True),
    Case("profile-dry-run", words="profile trained.yaml --dry-run --json"),
    Case("profile-over-budget", words="profile trained.yaml --yes --json --set search.max_node_hours=0.0001"),
    Case("profile-not-confirmed", words="profile trained.yaml --json"),
    Case("profile-slurm-dry-run", slow=True, words="profile queued.yaml --dry-run --json", slurm=True),
    Case("profile-strategies", words="profile trained.yaml --dry-run --json --set search.strategy=partial"),
    Case("profile-no-sbatch", slow=True, words="profile queued.yaml --yes --json"),
    Case("status-no-run", words="status --json"),
    Case("recommend-no-run", words="recommend --json"),
    Case("recommend-demo", words="recommend --demo --json"),
    Case("recommend-not-measured", words="recommend trained.yaml --json"),
    Case("train-not-measured", words="train trained.yaml --dry-run --json"),
    Case("list-no-run", words="list --json"),
    Case("observe-no-command", words="observe --json"),
    Case("observe-no-job", words="observe --report --json"),
    Case("observe-nothing-trained", words="observe --json -- python -c pass"),
    # --- pending probes
    Case("status-pending", "pending", "status --json", slurm=True),
    Case("profile-pending", "pending", "profile queued.yaml --json --no-wait", slurm=True, slow=True),
    Case("recommend-pending", "pending", "recommend --json", slurm=True),
    Case("cancel-pending", "pending", "cancel --json", slurm=True),
    # --- measured
    Case("status-measured", "measured", "status --json"),
    Case("profile-measured", "measured", "profile measured.yaml --json --yes", slow=True),
    Case("profile-partly-measured", "measured", "profile measured.yaml --dry-run --json", edit=remove_files("results/*n002*", "results/*n004-l000032*"), slow=True),
    Case("recommend-knee", "measured", "recommend --json"),
    Case("recommend-time", "measured", "recommend --json --objective time --save", shows=("tula-runs/*/recommended.yaml", "tula-runs/*/results.csv")),
    Case("recommend-cost", "measured", "recommend --json --objective cost"),
    Case("recommend-accuracy-time", "measured", "recommend --json --objective accuracy-time"),
    Case("recommend-energy", "measured", "recommend --json --objective energy"),
    Case("recommend-cost-curve", "measured", "recommend --json --curve cost"),
    Case("recommend-limits", "measured", "recommend --json --max-nodes 2 --max-batch 128 --deadline 1 --budget 10"),
    Case("recommend-trainings", "measured", "recommend --json --trainings 10 --max-nodes 4"),
    Case("recommend-trainings-deadline", "measured", "recommend --json --trainings 10 --max-nodes 4 --deadline 1.1m"),
    Case("recommend-trainings-late", "measured", "recommend --json --trainings 10 --max-nodes 4 --deadline 0.5m"),
    Case("recommend-trainings-save", "measured", "recommend --json --trainings 10 --save"),
    Case("recommend-trainings-jobs", "measured", "recommend --json --run measured --run second --trainings 3 --trainings 4 --max-nodes 4", edit=with_second_job),
    Case("recommend-trainings-jobs-table", "measured", "recommend --run measured --run second --trainings 10 --trainings 20 --max-nodes 4 --objective time", edit=with_second_job),
    Case("recommend-trainings-jobs-unmatched", "measured", "recommend --json --run measured --run second --trainings 3", edit=with_second_job),
    Case("train-seeds-dry-run", "measured", "train --seeds 3 --dry-run --json"),
    Case("train-seeds-table", "measured", "train --seeds 3 --dry-run"),
    Case("train-seeds-nodes", "measured", "train --seeds 3 --nodes 2 --json"),
    Case("recommend-trainings-table", "measured", "recommend --trainings 10 --max-nodes 4"),
    Case("recommend-bad-deadline", "measured", "recommend --json --deadline soon"),
    Case("recommend-nodes", "measured", "recommend --json --nodes 4"),
    Case("recommend-impossible", "measured", "recommend --json --deadline 0.000001"),
    Case("recommend-bad-objective", "measured", "recommend --json --objective fastest"),
    Case("recommend-spot", "measured", "recommend --json --objective cost --set pricing.spot.discount=0.6 --set pricing.spot.interruptions_per_day=2"),
    Case("recommend-lbt", "measured", "recommend --json --set train.method=lbt"),
    Case("recommend-table", "measured", "recommend"),
    Case("recommend-too-few", "measured", "recommend --json", edit=remove_files("results/*n00[124]-l0000[136]*", "results/*l000256*", "results/*l000128*")),
    Case("train-measured-dry-run", "measured", "train --dry-run --json --nodes 2 --batch 256"),
    Case("train-bad-batch", "measured", "train --dry-run --json --nodes 4 --batch 33"),
    Case("train-ramp-dry-run", "measured", "train --dry-run --json --nodes 1 --batch 256 --set train.ramp=auto"),
    Case("report-measured", "measured", "report --json", package="report"),
    make_python_case("python-results", "measured", "show(rows(tula.Run.open(__import__('glob').glob('tula-runs/measured-*')[0]).results()))"),
    make_python_case("python-recommend", "measured", "r = tula.recommend('measured.yaml', objective='cost', save=False)\nshow({'choice': [r.choice.nodes, r.choice.batch, r.choice.hours, r.choice.cost], 'rows': rows(r.frame()), 'warnings': list(r.warnings)})"),
    make_python_case("python-plan-trainings", "measured", "plan = tula.plan_trainings('measured.yaml', 10, max_nodes=4)\nshow({'hours': plan.hours, 'cost': plan.cost, 'speedup': plan.speedup, 'waves': rows(plan.frame())})"),
    make_failing_case("python-infeasible", "measured", "tula.recommend('measured.yaml', deadline_hours=1e-6)"),
    make_failing_case("python-bad-argument", "measured", "tula.recommend('measured.yaml', nodes=0)"),
    make_failing_case("python-no-run", "", "tula.recommend('trained.yaml')"),
    make_failing_case("python-bad-job", "", "tula.check({'name': 'x'})"),
    make_failing_case("python-over-budget", "", "tula.profile('trained.yaml', max_node_hours=0.0001)"),
    # --- trained
    Case("status-trained", "trained", "status --json"),
    Case("status-trained-table", "trained", "status"),
    Case("train-finished", "trained", "train --json --yes"),
    Case("evaluate-known", "trained", "evaluate --json"),
    Case("evaluate-last-dry-run", "trained", "evaluate --dry-run --json --weights last --fresh"),
    Case("evaluate-no-training", "measured", "evaluate --json"),
    Case("evaluate-no-such-training", "trained", "evaluate --json --training 12345678"),
    Case("report-trained", "trained", "report --json", package="report"),
    Case("report-markdown", "trained", "report --markdown", package="report"),
    Case("report-csv", "trained", "report --csv -", package="report"),
    Case("logs-trained", "trained", "logs --json"),
    Case("list-trained", "trained", "list --json"),
    Case("list-table", "trained", "list"),
    Case("clean-dry-run", "trained", "clean --dry-run --json --keep best"),
    Case("clean-all", "trained", "clean --yes --json --quiet", shows=("tula-runs/*/train/*/checkpoints/*",)),
    Case("export-unknown", "trained", "export --to nowhere --json", package="trackers"),
    make_python_case("python-status", "trained", "show(rows(tula.status('trained.yaml').frame()))"),
    make_python_case("python-report-text", "trained", "print(tula.report_text('trained.yaml'))", package="report"),
    # --- out of memory, failed, types, script, comparison, self-tuned
    Case("status-memory", "memory", "status --json"),
    Case("recommend-memory", "memory", "recommend --json --objective time"),
    Case("train-after-memory", "memory", "train --json --nodes 1 --batch 64 --yes"),
    Case("status-largest", "largest", "status --json"),
    Case("profile-largest", "largest", "profile largest.yaml --largest --json --yes"),
    Case("profile-largest-table", "largest", "profile largest.yaml --largest --yes"),
    Case("profile-largest-continued", "largest", "profile largest.yaml --largest --dry-run --json", edit=remove_files("results/*l000021*")),
    Case("profile-largest-no-limit", words="profile trained.yaml --largest --dry-run --json"),
    Case("compare-rates", "rates", "compare trained.yaml --batches --batch 32 --json --yes --set train.epochs=60"),
    Case("compare-rates-table", "rates", "compare --batches --batch 32 --show --set train.epochs=60"),
    Case("compare-rates-dry-run", "measured", "compare measured.yaml --learning-rates --batch 32 --dry-run --json --set train.reference_batch=8", slow=True),
    Case("compare-rates-script", "script", "compare script.yaml --learning-rates --batch 32 --dry-run --json"),
    Case("status-rates", "rates", "status --json"),
    Case("recommend-largest", "largest", "recommend --json --objective time"),
    make_python_case("python-largest", "largest", "largest = tula.find_largest_batch('largest.yaml', max_node_hours=1)\nshow([largest.batch, largest.local_batch, largest.too_large, largest.finished])"),
    Case("status-failed", "failed", "status --json"),
    Case("recommend-failed", "failed", "recommend --json"),
    Case("logs-failed", "failed", "logs"),
    Case("status-types", "types", "status --json"),
    Case("recommend-types", "types", "recommend --json --objective cost"),
    Case("recommend-one-type", "types", "recommend --json --objective time --type pair"),
    Case("recommend-no-such-type", "types", "recommend --json --type triple"),
    Case("status-script", "script", "status --json"),
    Case("recommend-script", "script", "recommend --json --objective time"),
    Case("recommend-observed", "observed", "recommend script.yaml --json --objective time --observed own_train", shows=("tula-runs/*/results/*.json",)),
    Case("recommend-observed-no-script", "observed", "recommend measured.yaml --json --observed own_train"),
    make_python_case("python-recommend-observed", "observed", "r = tula.recommend('script.yaml', observed='own_train')\nshow([r.choice.nodes, r.choice.batch, r.choice.source])"),
    Case("observe-report", "observed", "observe --report own_train"),
    Case("train-script-dry-run", "script", "train --dry-run --json --nodes 1 --batch 16"),
    Case("compare-show", "comparison", "compare --show --json"),
    Case("compare-table", "comparison", "compare --show"),
    Case("compare-dry-run", "comparison", "compare --dry-run --json --methods lbt,lrs,ags:delta=0.1 --batch 16,32"),
    Case("compare-unknown-method", "comparison", "compare --dry-run --json --methods lbt,sgd"),
    Case("report-comparison", "comparison", "report --json", slow=True, package="report"),
    Case("status-self-tuned", "ramped", "status --json"),
    Case("recommend-self-tuned", "ramped", "recommend --json --objective accuracy-time"),
    # --- a chain of jobs on SLURM
    Case("status-chain", "chain", "status --json", slurm=True),
    Case("train-chain", "chain", "train queued.yaml --nodes 1 --batch 32 --json --no-wait", slow=True, slurm=True),
    Case("cancel-chain", "chain", "cancel --json", slurm=True),
    Case("train-slurm-dry-run", "pending", "train --dry-run --json --nodes 2 --batch 32", slow=True, slurm=True),
    Case("train-moldable-dry-run", "pending", "train --dry-run --json --nodes 1-4 --batch 32", slurm=True),
    Case("train-moldable-plan", "pending", "train --dry-run --nodes 2-4 --batch 32", slow=True, slurm=True),
    Case("train-moldable-local", "measured", "train --dry-run --json --nodes auto"),
    # --- damaged
    Case("status-damaged-result", "trained", "status --json", edit=truncate_file("results/*.json")),
    Case("recommend-damaged-result", "trained", "recommend --json", edit=truncate_file("results/*.json")),
    Case("recommend-damaged-answer", "trained", "recommend --json", edit=truncate_file("recommendation.json")),
    Case("status-damaged-metrics", "trained", "status --json", edit=truncate_file("train/*/metrics.jsonl")),
    Case("train-damaged-task", "trained", "train --json --dry-run", edit=truncate_file("spec.json")),
    Case("status-later-format", "trained", "status --json", edit=set_later_format),
    Case("diff-two-runs", "measured", "diff measured trained --json", edit=lambda folder: add_trained_run(folder)),
)  # fmt: skip


def add_trained_run(folder: Path) -> None:
    """Copy the run `trained` to the folder of the recorded run; each has the name of its job."""
    import recorded_runs

    recorded_runs.copy_run("trained", folder)
    for name in ("measured", "trained"):
        (folder / name).symlink_to(
            find_first(folder.parent / folder.name, "format").parent.parent
            / next(p.name for p in (folder / "tula-runs").iterdir() if p.name.startswith(f"{name}-"))
        )
