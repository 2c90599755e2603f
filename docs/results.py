"""Write reference/results.md, which shows the files of benchmarks/results.

python docs/results.py        # run by `make docs`; a test compares the committed page with its output
"""

import csv
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
BENCHMARKS = DOCS.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
PAGE = DOCS / "reference" / "results.md"
sys.path[:0] = [path for path in (str(BENCHMARKS / "table1"), str(BENCHMARKS / "reality")) if path not in sys.path]

import comparison  # noqa: E402
import table1_summary  # noqa: E402
from table1_settings import SETTINGS  # noqa: E402

NOTE = "<!-- Written by docs/results.py from benchmarks/results; edit that instead. -->"
ROWS = {
    "small": "small batch",
    "lbt": "`lbt`",
    "lbt-x4": "`lbt`, learning rate x4",
    "lbt-longer": "`lbt` with as many steps as `ramp`",
    "lrs": "`lrs`",
    "sqrt": "`lrs`, square root",
    "lars": "`lars`",
    "lamb": "`lamb`",
    "static": "`static`",
    "ags": "`ags`",
    "ags-8": "`ags`, small batch 8",
    "ramp-plain": "`lrs` with `train.ramp: auto`",
    "ramp-plain-sqrt": "`lrs`, square root, with `train.ramp: auto`",
    "ortho": "`ortho`",
    "ramp-torch-betas": "`ramp`, cosine schedule, beta1 0.9",
    "ramp": "**`ramp`**, with the job's schedule",
    "ramp-late-beta1": "**`ramp`**, with its default schedule",
    "ramp-uncapped": "`ramp`, no limit and no clipping",
    "auto": "`auto`",
}
"""Rows of benchmarks/table1 that the page shows, with their names."""
FAMILIES = {
    "AdamW": "AdamW and a cosine schedule",
    "SGD": "SGD with a multistep or cosine schedule",
    "paper": "The paper's setting, SGD and an AlexNet with dropout and without normalisation, 100 epochs with three milestones",
}
REDUCED_ROWS = {
    "lbt": "`lbt`",
    "lbt-x2": "`lbt`, learning rate x2",
    "lbt-x4": "`lbt`, learning rate x4",
    "lrs": "`lrs`",
    "sqrt": "`lrs`, square root",
    "lars": "`lars`",
    "lamb-adamw": "`lamb`",
    "polo": "`polo`",
    "static": "`static`",
    "schedule-free": "`schedule_free`",
    "ags": "`ags`",
    "robust": "`ags`, preset robust",
    "ortho": "`ortho`",
    "auto": "`auto`",
    "ramp": "**`ramp`**",
    "ramp-noise": "`ramp` with `train.ramp: noise`",
}
NETWORKS = {"small": "BatchNorm", "plain": "no BatchNorm"}
SCRIPTS = {
    "torchvision": "torchvision's classification reference, June 2024",
    "timm": "timm, August 2026",
    "nanogpt": "nanoGPT, November 2025",
    "trainer": "Hugging Face's run_clm, transformers 4.49",
    "accelerate": "the same under `accelerate launch --cpu`",
    "lightning": "Lightning's image classifier under torchrun, July 2026",
    "imagenet": "pytorch/examples imagenet, August 2025",
    "words": "pytorch/examples word_language_model, August 2025",
}

HEAD = """This page has all measured results that other pages mention. Unless a section says otherwise, they were measured on one or two
CPU cores. Each section names the command that repeats its measurements."""


def make_page() -> str:
    """Return the page of results."""
    sections = (
        render_accuracy(),
        render_reduced_table(),
        render_step_times(),
        render_observed_jobs(),
        render_same_progress(),
        render_learning_rates(),
        render_reality(),
        render_scripts(),
        render_gpu(),
    )
    return "\n\n".join([NOTE, "# Results", HEAD, *sections]) + "\n"


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


# --- accuracy

ACCURACY_HEAD = """`python benchmarks/table1/table1.py` trains small networks of 10,000 to 200,000 parameters on data that comes with Python and
scikit-learn (`reduced`: 5,120 images of CIFAR-10 at 16 pixels). The large batch is 8 or 16 times the small batch, for which the
learning rate was chosen. The rows "small batch" and `lbt` contain the loss, or top-1 in percent. All other rows contain the share
of `lbt`'s gap to the small batch that the method recovers, in percent: the mean over seeds ± standard error. A cell without ± has one
seed. Shares in brackets are relative to a small batch that is trained with the same kind of steps and the same schedule."""


def render_accuracy() -> str:
    """Return the section of the settings of benchmarks/table1."""
    results = table1_summary.read_results(RESULTS / "table1.csv")
    parts = ["## Accuracy", ACCURACY_HEAD]
    for family, words in FAMILIES.items():
        names = [name for name, setting in SETTINGS.items() if setting.family == family and (name, "lbt", 0) in results]
        rows = [
            [label, *(table1_summary.format_overview_cell(results, name, method) for name in names)]
            for method, label in ROWS.items()
            if any(key[0] in names and key[1] == method for key in results)
        ]
        head = ["", *(f"{name}: {SETTINGS[name].small} to {SETTINGS[name].large}" for name in names)]
        parts += [f"{words}:", format_table(head, rows)]
    parts.append(
        "`train.ramp: decay` with `lbt`, up to 8 times the small batch, and the small batch (loss, or top-1 in percent):"
    )
    parts.append(
        format_table(["", "steps", "result", "steps of the small batch", "its result"], list(decay_rows(results)))
    )
    return "\n\n".join(parts)


def decay_rows(results: table1_summary.Results) -> Iterable[list[str]]:
    """Yield a row for each setting that was trained with `train.ramp: decay`."""
    for name in (name for name in SETTINGS if (name, "decay", 0) in results):
        cells = [name]
        for method in ("decay", "small"):
            values = list(table1_summary.select_values(results, name, method).values())
            steps = [result.steps for key, result in results.items() if key[:2] == (name, method)]
            digits = 3 if table1_summary.is_less_better(results, name) else 2
            cells += [
                f"{statistics.fmean(steps):,.0f}",
                table1_summary.format_mean(table1_summary.Mean.of(values), digits),
            ]
        yield cells


# --- the reduced Table I

REDUCED_HEAD = """A small network, with and without BatchNorm, was trained on 10,240 images of CIFAR-10 (16 x 16 pixels) for 20 epochs, on 2 ranks
and with 3 seeds. The learning rate for batch 128 was 0.05 (0.01 without BatchNorm); nothing was tuned. Cells contain top-1 in
percent (mean ± standard deviation), and in brackets the share of `lbt`'s gap to the small batch that the method recovers, in percent. The results
are from an earlier version of the benchmark. The full Table I needs a GPU and has not been run."""

Runs = Mapping[tuple[str, str, int], Sequence[float]]
"""Values over seeds by network, method and batch."""


def read_reduced() -> Runs:
    """Return the top-1 of the reduced Table I."""
    runs: dict[tuple[str, str, int], list[float]] = {}
    with (RESULTS / "table1_reduced.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["metric"] == "top1":
                runs.setdefault((row["network"], row["method"], int(row["batch"])), []).append(float(row["value"]))
    return runs


def render_reduced_table() -> str:
    """Return the section of the reduced Table I."""
    runs = read_reduced()
    columns = [(network, batch) for network in NETWORKS for batch in (1024, 2048)]
    small = "; ".join(f"{words} {format_spread(runs[network, 'lbt', 128])}" for network, words in NETWORKS.items())
    rows = [
        [label, *(format_reduced_cell(runs, network, method, batch) for network, batch in columns)]
        for method, label in REDUCED_ROWS.items()
        if any((network, method, batch) in runs for network, batch in columns)
    ]
    head = ["", *(f"{NETWORKS[network]}, {batch:,}" for network, batch in columns)]
    gain = f"On average over these columns, `ags` gains {reduced_gain(runs):.1f} points over `lbt`; in the paper's Table I it gains 8.8."
    return "\n\n".join(["## Reduced Table I", REDUCED_HEAD, f"Batch 128: {small}.", format_table(head, rows), gain])


def format_reduced_cell(runs: Runs, network: str, method: str, batch: int) -> str:
    """Return the mean, the standard deviation and the share of the loss that a method recovers."""
    values = runs.get((network, method, batch))
    if not values:
        return ""
    share = recovered_share(runs, network, method, batch)
    return format_spread(values) + ("" if method == "lbt" else f" ({share:.0f})")


def recovered_share(runs: Runs, network: str, method: str, batch: int) -> float:
    """Return the share in percent of the accuracy lost at the large batch that a method recovers."""
    small, large = (statistics.fmean(runs[network, "lbt", size]) for size in (128, batch))
    return 100 * (statistics.fmean(runs[network, method, batch]) - large) / (small - large)


def reduced_gain(runs: Runs, method: str = "ags") -> float:
    """Return the mean gain over `lbt` in points."""
    columns = [(network, batch) for network in NETWORKS for batch in (1024, 2048)]
    return statistics.fmean(
        statistics.fmean(runs[network, method, batch]) - statistics.fmean(runs[network, "lbt", batch])
        for network, batch in columns
    )


def format_spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation of some values."""
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


# --- step times

STEPS_HEAD = """The data are 64 sets of step times that Pollux's authors published (two clusters with T4 and RTX GPUs, five applications). tula's
priors were derived from the same data. The errors are those of configurations that were not probed. "Slower" is how much slower
the configuration chosen as the fastest is than the one that is fastest; "more expensive" is the same for the cheapest. The cost
of the probes is relative to measuring every configuration in a separate job. Command: `python benchmarks/replay/replay.py
TABLE.csv --json`."""


def render_step_times() -> str:
    """Return the section of the replayed step times."""
    data = json.loads((RESULTS / "replay.json").read_text(encoding="utf-8"))
    again = data["repeats"]
    noise = (
        f"{again['configurations']} of the configurations were measured more than once. Their step times differ by"
        f" {format_percent(again['median'])} in the median (p90 {format_percent(again['p90'])}), so no model can have smaller errors."
    )
    return "\n\n".join(
        [
            "## Step times",
            STEPS_HEAD,
            render_replay_table(data["steps"]),
            noise,
            "The same tables for a job that reports only the time of whole steps, such as a script without DDP:",
            render_replay_table(data["whole_steps"]),
            STRATEGIES_HEAD,
            render_strategies_table(data["strategies"]),
            MORE_NODES_HEAD,
            render_more_nodes_table(data["more_nodes"]),
            TRAININGS_HEAD,
            render_trainings_table(data["trainings"]),
        ]
    )


STRATEGIES_HEAD = """The next table adds the cost of a search to what its choice loses, as a share of the best training. The first value is in
node-hours, for the cheapest choice; the second is in wall time, for the fastest choice (`replay_worth.py`). `auto` uses `sweep`
instead of `adaptive` for trainings longer than about ten hours."""


def render_strategies_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the cost of each strategy by the length of the training."""
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    costs = {
        (row["hours"], row["strategy"]): f"{format_percent(row['money'])}, {format_percent(row['time'])}"
        for row in rows
    }
    lines = [
        [f"{hours:g} h", *(costs[hours, strategy] for strategy in strategies)]
        for hours in dict.fromkeys(row["hours"] for row in rows)
    ]
    return format_table(["fastest training", *(f"`{strategy}`" for strategy in strategies)], lines)


MORE_NODES_HEAD = (
    "Predictions for more nodes than any probe had, as with `tula recommend --nodes 32` (`replay_further.py`):"
)


def render_more_nodes_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the prediction errors of configurations on more nodes than were measured."""
    lines = [
        [
            str(row["cluster"]),
            str(row["most"]),
            str(row["most"] * row["times"]),
            format_percent(row["median"]),
            format_percent(row["covered"], 0),
            f"{row['width']:.1f}",
        ]
        for row in rows
    ]
    head = [
        "cluster",
        "nodes probed up to",
        "nodes predicted",
        "median error",
        "90 % interval holds",
        "its upper end over its lower",
    ]
    return format_table(head, lines)


TRAININGS_HEAD = """Prediction errors at half and twice the batch or number of nodes of a training, before and after the fit includes this training
(`replay_trained.py`):"""


def render_trainings_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the prediction errors of neighbours of a training, with and without the times of this training."""
    lines = [
        [
            f"`{row['strategy']}`",
            *(
                f"{format_percent(row[key][0], digits)}, {format_percent(row[key][1], digits)}"
                for key, digits in (("median", 1), ("covered", 0))
            ),
        ]
        for row in rows
    ]
    return format_table(["probes", "median error", "90 % interval holds"], lines)


def render_replay_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of a replay: tula, and the best of the other models."""
    strategies = list(dict.fromkeys(name.partition(", ")[0] for name in rows))
    lines = []
    for strategy in strategies:
        value = rows[f"{strategy}, tula"]
        others = {name.partition(", ")[2]: row for name, row in rows.items() if name.startswith(f"{strategy}, ")}
        del others["tula"]
        best = min(others, key=lambda name: others[name]["median"])
        lines.append(
            [
                f"`{strategy}`",
                f"{format_percent(value['median'])} / {format_percent(value['p90'])}",
                f"{format_percent(others[best]['median'])} / {format_percent(others[best]['p90'])} ({best})",
                format_percent(value["covered"], 0),
                f"{format_percent(value['fastest'] or 0)}, {format_percent(value['cheapest'] or 0)}",
                f"{value['cost']:.2f}",
            ]
        )
    head = [
        "probes",
        "tula: median / p90 error",
        "best other model",
        "90 % interval holds",
        "slower, more expensive",
        "cost",
    ]
    return format_table(head, lines)


def format_percent(share: float, digits: int = 1) -> str:
    """Format a share in percent."""
    return f"{100 * share:.{digits}f} %"


# --- observed jobs

OBSERVED = {
    "within a node": "one node to half of its GPUs",
    "2 nodes to 1": "two nodes to one",
    "more nodes": "more nodes to half of them",
    "all": "all",
}


def render_observed_jobs() -> str:
    """Return the section of predictions from one observed job."""
    data = json.loads((RESULTS / "observe.json").read_text(encoding="utf-8"))
    fitted = data["fitted"]
    head = f"""`tula observe` predicts from one job the step time on half of the GPUs, with the same batch per GPU. The data are step times that
Pollux's authors published. The ring law, for comparison, only scales the exposed synchronisation. "Cheaper" is how often the
prediction is right about whether half of the GPUs need at most 90 % of the node-hours. The report advises using half of the GPUs
if this is at least 60 % likely; brackets show how often this advice is right. One job hardly allows better predictions:
a median regression with 28 coefficients, fitted to these pairs themselves, still has errors of {format_percent(fitted["median"])} / {format_percent(fitted["p90"], 0)}
and is right in {format_percent(fitted["right"], 0)}. Command: `python benchmarks/observe/observe.py TABLE.csv --json`."""
    rows = [
        [
            words,
            str(data[name]["pairs"]),
            f"{format_percent(data[name]['ring_median'])} / {format_percent(data[name]['ring_p90'], 0)}",
            f"{format_percent(data[name]['median'])} / {format_percent(data[name]['p90'], 0)}",
            format_percent(data[name]["covered"], 0),
            f"{format_percent(data[name]['ring_right'], 0)} / {format_percent(data[name]['right'], 0)}",
            _describe_advice(data[name]),
        ]
        for name, words in OBSERVED.items()
    ]
    columns = ["from", "pairs", "ring law: median / p90 error", "tula: median / p90 error", "90 % interval holds"]
    return "\n\n".join(
        ["## Observed jobs", head, format_table([*columns, "cheaper: ring law / tula", "advised"], rows)]
    )


def _describe_advice(scores: Mapping[str, Any]) -> str:
    """Return how often half the batch is advised, and in brackets how often it then is no more expensive."""
    cheaper = scores["advised_cheaper"]
    return format_percent(scores["advised"], 0) + ("" if cheaper is None else f" ({format_percent(cheaper, 0)})")


# --- the same progress

NOISES = {
    "first epoch, noise grows": "of the first epoch, growing (`accuracy-time` without further measurements)",
    "10 % trained, noise grows from there": "after a tenth of the epochs (with `train.diagnostics: [gradient_noise]`)",
    "first epoch, constant noise": "of the first epoch, constant",
    "noise of the whole run": "of the whole run, which is not known beforehand",
    "perfect scaling (fixed epochs)": "none: the fixed number of epochs",
}


def render_same_progress() -> str:
    """Return the section of the time to the same progress."""
    data = json.loads((RESULTS / "efficiency.json").read_text(encoding="utf-8"))
    head = f"""tula predicts from the gradient noise how many iterations another batch needs to reach the same metric. The data are
{data["cases"]} cases of {data["applications"]} applications that Pollux's authors published. For each application, the exponent of the growth was fitted
on the other applications. Command: `python benchmarks/replay/efficiency.py TABLE.csv --json`."""
    rows = [
        [words, f"{data['errors'][name]['median']:.0f} %", f"{data['errors'][name]['p90']:.0f} %"]
        for name, words in NOISES.items()
    ]
    return "\n\n".join(["## The same progress", head, format_table(["gradient noise", "median error", "p90"], rows)])


# --- learning rates

SEARCHED_JOBS = {
    "perceptron": "perceptron, digits",
    "cifar": "small CNN, part of CIFAR-10",
    "gpt2": "small GPT-2, Python source",
}


def render_learning_rates() -> str:
    """Return the section of searches for the learning rate of a large batch."""
    data = json.loads((RESULTS / "learning_rates.json").read_text(encoding="utf-8"))
    head = """The learning rate that `tula compare --learning-rates` chooses is compared with full trainings at 1, sqrt(k) and k times the rate
of the reference batch, at k = 4, 8 or 16 times that batch, with 2 or 3 seeds. The optimizers are SGD and AdamW, with rates that
are too low, right and too high for the reference batch; the method is `lrs`, and in 4 settings `ramp`. A choice is right if its
mean differs from the best one by no more than the noise of the seeds. "Lowest" is the rate with the lowest loss in the branches.
The cost is a share of a training. In 18 other settings with digits, a
margin of a quarter of the loss and 0.05 was right in 97 %, and the lowest loss in 83 %. The limits of the margin (0.05 and half of the gain) were chosen on the settings of the
table; a quarter alone would be right in 91 %. Command: `python benchmarks/learning_rates/learning_rates.py OUT.jsonl --json`."""
    names = {**{name: words for name, words in SEARCHED_JOBS.items() if name in data}, "all": "all"}
    rows = [
        [
            words,
            f"{data[name]['settings']}, {data[name]['searches']}",
            *(format_percent(data[name][key], 0) for key in ("right", "lowest_right")),
            *(format_percent(data[name]["always"][rule], 0) for rule in ("none", "sqrt", "linear")),
            f"{format_percent(data[name]['cost'])}, {format_percent(data[name]['max_cost'])}",
        ]
        for name, words in names.items()
    ]
    columns = ["job", "settings, searches", "choice right", "lowest right", "always 1", "always sqrt(k)", "always k"]
    fresh = json.loads((RESULTS / "learning_rates_fresh.json").read_text(encoding="utf-8"))["all"]
    check = f"""The limits were then tested in {fresh["searches"]} searches in {fresh["settings"]} new settings (digits, perceptron and language model; k = 8; other
seeds). The choice was right in {format_percent(fresh["right"], 0)}, the lowest loss in {format_percent(fresh["lowest_right"], 0)}, and k times the rate, without a search, in {format_percent(fresh["always"]["linear"], 0)}.
The median cost was {format_percent(fresh["cost"])}."""
    return "\n\n".join(["## Learning rates", head, format_table([*columns, "cost: median, most"], rows), check])


# --- predictions and reality

REALITY_HEAD = """Four jobs were measured on 1, 2 and 4 ranks: tula's own loop (`loop`), a script (`script`), a sharded model (`fsdp`), and tula's own
loop on SLURM nodes with links of 200 Mbit/s (`loop-links`). Gloo synchronises the ranks; instead of computing, they sleep. For
each job there are three sweeps, two full searches and a training. An earlier fit, which assumed that computing hides
synchronisation, predicted the trainings. The current fit predicts a step of `fsdp` that is 3 % too long instead of 23 % too short.
Command: `python benchmarks/reality/reality.py`."""


def render_reality() -> str:
    """Return the section of predictions on real ranks."""
    rows = comparison.read_rows(RESULTS / "reality.csv")
    shown = [row for row in rows if row.truth != comparison.TRAINING or row.quantity in ("step", "time")]
    first, _, trainings, *_ = comparison.format_tables(shown).split("\n\n")
    return "\n\n".join(["## Predictions and reality", REALITY_HEAD, first, trainings])


# --- scripts

SCRIPTS_HEAD = """Published training scripts ran without changes on two CPU cores, with one and two ranks and three batches each. The columns "killed"
and "out of memory" describe trainings that were interrupted once in this way: the samples they trained, and their batch at the
end. The change of CPU time per step by tula's hooks has a 90 % interval. Command: `python benchmarks/scripts.py`. On two CPU ranks,
run_clm's own resume fails. The two ranks of `accelerate launch --cpu` train independently; tula reports this and stops the
training. nanoGPT runs one step more than requested. word_language_model changes its weights without a torch optimizer, so tula
cannot observe it."""


def render_scripts() -> str:
    """Return the section of published scripts."""
    result = json.loads((RESULTS / "scripts.json").read_text(encoding="utf-8"))["local"]
    rows = [[words, *format_script_cells(result[name])] for name, words in SCRIPTS.items()]
    head = ["script", "probes measured", "resume test", "killed", "out of memory", "CPU time per step"]
    return "\n\n".join(["## Published scripts", SCRIPTS_HEAD, format_table(head, rows)])


def format_script_cells(script: Mapping[str, Any]) -> list[str]:
    """Return the cells of one script."""
    probes = script["profile"]["rows"]
    measured = sum(row["kind"] == "measured" for row in probes)
    test, overhead = script.get("rehearse"), script.get("overhead")
    verdict = f"`{test['verdict']}`" if test and test["verdict"] else "rejected" if test else "no checkpoint option"
    return [
        f"{measured} of {len(probes)}",
        verdict if measured else "",
        *(format_interrupted_cell(script[name]) if name in script else "" for name in ("killed", "full")),
        f"{overhead['percent']:+.1f} % ({overhead['low_percent']:+.1f} to {overhead['high_percent']:+.1f})"
        if overhead
        else "",
    ]


def format_interrupted_cell(training: Mapping[str, Any]) -> str:
    """Describe the outcome of an interrupted training."""
    if training["code"]:
        return f"fails with exit code {training['code']}"
    return f"{training['samples']:,} samples, batch {training['batch']:,}"


# --- claims of other pages


def quoted_figures() -> dict[str, str]:
    """Return the figures that other pages quote, by their description."""
    results = table1_summary.read_results(RESULTS / "table1.csv")
    runs = read_reduced()
    shares = [
        share.value
        for name in SETTINGS
        for row in ("ramp", "ramp-late-beta1")
        if (share := table1_summary.compute_recovered_share(results, name, row)) is not None
    ]
    losses = [
        statistics.fmean(table1_summary.select_values(results, name, "small").values())
        - statistics.fmean(table1_summary.select_values(results, name, "lbt").values())
        for name in SETTINGS
        if (name, "lbt", 0) in results and not table1_summary.is_less_better(results, name)
    ]
    replay = json.loads((RESULTS / "replay.json").read_text(encoding="utf-8"))["steps"]
    value = [row for name, row in replay.items() if name.endswith(", tula")]
    medians = sorted(row["median"] for row in value)
    costs = sorted(row["cost"] for row in value)
    bounds = [reduced_bounds(runs, method) for method in ("ramp", "ortho", "auto")]
    return {
        "ramp recovers": f"{min(shares):.0f} to {max(shares):.0f} %",
        "lbt loses": f"up to {max(losses):.0f} points",
        "ags gains": f"{reduced_gain(runs):.1f} points",
        "median error": f"{100 * medians[0]:.1f} to {100 * medians[-1]:.1f} %",
        "probing cost": f"{100 * costs[0]:.0f} to {100 * costs[-1]:.0f} %",
        "ramp in the reduced Table I": bounds[0],
        "ortho in the reduced Table I": bounds[1],
        "auto in the reduced Table I": bounds[2],
    }


def reduced_bounds(runs: Runs, method: str) -> str:
    """Return the smallest and the largest share of the accuracy loss that a method recovers in the reduced Table I."""
    shares = [recovered_share(runs, network, method, batch) for network in NETWORKS for batch in (1024, 2048)]
    assert not any(map(math.isnan, shares))
    return f"{min(shares):.0f} to {max(shares):.0f} %"


# --- a GPU

GPU_TAIL = """The other stages ([on a GPU](../on-gpu.md)) have not been measured yet: memory and the largest batch, the overhead of methods,
ranks by NCCL, resumption and the data loader."""


def render_gpu() -> str:
    """Return the section of benchmarks/on_gpu.py."""
    results = json.loads((RESULTS / "h100.json").read_text(encoding="utf-8"))
    machine, quickstart, oom = (results[stage]["data"] for stage in ("env", "quickstart", "oom"))
    head = f"""`python benchmarks/on_gpu.py` on one {machine["gpu"]} with {machine["cores"]} virtual cores, torch {machine["torch"]} and NCCL
{machine["nccl"]}. It copies {machine["copy_tbs"]:.2f} TB/s and multiplies bf16 matrices at {machine["bf16_tflops"]:.0f} TFLOP/s."""
    rows = [
        [
            "quickstart, 20 epochs",
            f"top-1 {quickstart['top1']} %, predicted step time {describe_error(quickstart['step_error'])}",
        ],
        ["times that the host waits for the GPU in a step", count_waits(results["syncs"]["data"]["syncs"])],
        *timing_rows(results["timing"]["data"]),
        [
            f"out of memory at batch {oom['batches'][0]}, which trains at {oom['batches'][-1]}",
            f"relaunched after {' and '.join(map(str, oom['relaunch_seconds']))} s; the memory is free again after"
            f" {' and '.join(map(str, oom['held_seconds']))} s",
        ],
        [
            "errors of CUDA, cuBLAS, cuDNN and NCCL",
            f"{len(results['errors']['data']['errors'])} kinds classified correctly",
        ],
    ]
    return "\n\n".join(["## On a GPU", head, format_table(["measured", "result"], rows), GPU_TAIL])


def describe_error(share: float) -> str:
    """Describe a relative error in words."""
    return f"{abs(100 * share):.1f} % too {'high' if share > 0 else 'low'}"


def count_waits(cases: Mapping[str, Any]) -> str:
    """Return the range of counts by precision."""
    by_precision: dict[str, set[float]] = {}
    for case, row in cases.items():
        by_precision.setdefault(case.rpartition(",")[2], set()).add(row["count"])
    ranges = [
        f"{precision} {min(counts):g}" + (f" to {max(counts):g}" if max(counts) > min(counts) else "")
        for precision, counts in by_precision.items()
    ]
    methods = len({case.rpartition(",")[0] for case in cases})
    return f"{', '.join(ranges)} ({methods} methods and variants)"


def timing_rows(timing: Mapping[str, Any]) -> Iterable[list[str]]:
    """Yield a row for each model whose step times agree between two measurements."""
    steady = {case: row for case, row in timing["timing"].items() if abs(row["control"] - 1) <= 0.01}
    for case, row in steady.items():
        model, batch, precision = case.split(",")
        off = row["probe_ms"] / row["events_ms"] - 1
        yield [
            f"a probe's step of {model} at batch {batch}, {precision}",
            f"{row['probe_ms']:.1f} ms, {describe_error(off)}",
        ]
    others = [abs(row["control"] - 1) for case, row in timing["timing"].items() if case not in steady]
    yield [
        f"{len(others)} smaller cases, limited by the host",
        f"two equal measurements differ by {100 * min(others):.0f} to {100 * max(others):.0f} %",
    ]
    yield ["steps after 20 s of load, relative to the first", f"{timing['sustained_ratio']:.3f}"]


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
