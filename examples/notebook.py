# %% [markdown]
# # From a job to a trained network, in Python
#
# The cells below do what `tula check`, `profile`, `recommend` and `train` do. Run them in a notebook (VS Code, Spyder and
# jupytext read `# %%` as cells) or as `python examples/notebook.py`; runs are kept in `tula-runs/`, here.

# %%
import tula_cli as tula

job = {
    "name": "notebook",
    "model": {"name": "small_cnn", "args": {"in_channels": 1, "width": 8}},
    "dataset": {"name": "digits"},  # 8 x 8 pixels, 1438 to train on
    "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    "train": {"epochs": 2, "reference_batch": 128, "workers": 0},
    "search": {
        "nodes": [1, 2],
        "min_batch": 128,
        "max_batch": 256,
        "min_seconds": 0,
        "max_seconds": 0.2,
        "max_node_hours": 1,
    },
}

# %% Is the job sound, and what would it search?
checked = tula.check(job)
checked.require_sound("the job")
for report in checked.reports.values():
    print(report.probes, "probes in", len(report.jobs), "jobs, at most", report.node_hours_at_most, "node-hours")

# %% Measure: only what has no result yet; interrupt the cell and run it again, and it goes on.
run = tula.profile(job)
run.results()[["nodes", "batch", "local_batch", "outcome", "step_time_s", "peak_memory_bytes"]]

# %% Choose.
recommendation = tula.recommend(run, objective="time")
print(recommendation.choice.nodes, "nodes, batch", recommendation.choice.batch)
recommendation.frame()[["nodes", "batch", "hours", "cost", "measured", "chosen"]]

# %% Train there.
summary = tula.train(run)
if summary is not None:  # None where nobody waits, as on SLURM
    print(f"top-1 {summary.best_top1:.1f} %, predicted {summary.predicted_hours} h, took {summary.actual_hours} h")
tula.status(run).frame()
