"""The folder that goes with a script of the user's own: copied into the run, found through PYTHONPATH, installed nowhere.

It imports nothing of tula, only the standard library and the torch of the script (>= 2.0; Python >= 3.8). It does nothing
where TULA_PLAN is not set, and nothing before `import torch`. This text is the contract between a launcher and the shim,
version 1; `run/records/scripts.py` reads what the shim writes.

A launcher sets these variables, which torchrun, accelerate, srun and containers pass on:

    PYTHONPATH   this folder, before what was there
    TULA_CODE    folders of modules that come before those of the working directory; need not be set
    TULA_PLAN    the path of a JSON file, the plan; where ranks share a folder, all of them read the same file

The plan (optional keys with what they stand for when left out):

    version      1
    task         name of the task;  attempt: its start, from 1. Both are only repeated in what is written
    folder       where results go: of this attempt alone, made by the launcher or the shim
    mode         "probe": measure and stop; "train": count steps and samples, never stop by itself
    expected     {"world", "batch", "accumulate", "lr", "dataset"}, null or left out where nothing is claimed: repeated in the result
                 and compared on tula's side (`models/claims.py`)
    warmup       steps that are not timed (5)
    steps        timed steps; or min_steps, max_steps and seconds: as many as fit in that time (15)
    split_steps  steps each for synchronisation, gradient norms and local work (6; 0: none)
    stop         "exit": os._exit(0) once all ranks have written (default); "raise": SystemExit(0), which runs the
                 script's own `finally` and atexit
    heartbeat    least seconds between two heartbeats (1.0);  row: between two rows of a training (10.0)
    rehearsal    mode train: {"checkpoint": pattern, absolute; "after": steps; "ask": "", a signal's name, "file:PATH" or
                 "hooks"; "ask_at": the step at whose end it is asked; "settled": seconds (2)}: rank 0 kills itself (SIGKILL)
                 so many steps after the first checkpoint, once that has not changed for so long
    schedule     mode train, true: rows tell where torch's scheduler of the optimizer stands: {"schedule": {"name", "at": its
                 steps so far, "moves": whether it will change the learning rate again, null if that is not known}}
    files        folders whose files are the script's to write; where it is given, each process writes down what else it changes
    save         true: look for requests to save (mode train);  checkpoint: the path that the callback is given
    ags          adaptive gradient scaling around the script's optimizer, null for none: "code" (the folder with the package
                 tula_ags: the optimizers, which need Python 3.10 and torch 2.6), "settings" (as a preset spells them, and "parameters"),
                 "apply_to" ("gradient", "update"; null: by the optimizer), "b_large", "b_small", "available" (samples that a
                 rank computes at a time), "steps_per_epoch", "seed", "resumed" (whether it goes on from a checkpoint)

    ortho        orthogonalised steps of the script's optimizers, null for none: "code" as for ags, "beta2_power" (batch / reference
                 batch: Adam's beta2 becomes its power)

Each rank writes, every JSON file whole or not at all:

    result-<rank>.json     when the probe is over ("why": "stopped"), the script ended by itself ("ended") or after an asked
                           save ("saved"): what was seen, a list per step. Seconds and bytes.
    begun-<rank>.json      mode train, once its first steps are over ("why": "begun"; warmup + min_steps): the same of them, those
                           after the warm-up as "timed"; the result of a training repeats them
    failure-<rank>.json    an exception that nobody caught: class ("error"), traceback ("text"), rank (null where it is not
                           known; the file is named by host and process then), "where": script, shim, or method where
                           what the plan asks for cannot be done in this script; "batch_norm": "batch", "sync" (all over the
                           ranks) or "", by what the process held
    heartbeat-<rank>.json  from the first step on: "step", "samples", "stepped_at" (Unix time of the last step), "seconds"
                           (median of the last 100 steps), "step_samples" (median of the last 20 on this rank, null if unknown), "alive_at" (of the last step or batch), "lost" (why the shim gave
                           up, else null: a training goes on without it)
    steps-<rank>.jsonl     mode train: rows {"kind": "row"}: step, samples (of this rank), lr, loss, time, and "ags" (factors and
                           shares since the last row, "so_far" of all steps); {"kind": "gap"}: a step that held an
                           evaluation, a save or a new epoch: step, samples, "before" it, time, seconds, causes;
                           {"kind": "note"}: "text"; {"kind": "load"}: "path" of a file that torch.load has read before the first step, "written"
    files-<host>-<pid>.jsonl  with "files": {"path", "folder", "late": whether training had begun, "existed": whether it was there
                           before this start, "copy": of what was there; null with existed if it was too large}, before each change;
                           {"stepped": Unix time of the first step}
    rehearsal.json         rank 0 of a rehearsal, once there is a checkpoint: the "steps" and its "samples" before it, "dataset"
                           (samples that the data loader says it has), and whether the end of this process came: "killed"

A supervisor that wants a checkpoint writes `save.json`, {"then": "go on" | "stop"}, into the folder. All ranks see the
request after the same step and call what `tula_hooks.save` was given; rank 0 then writes saved.json (step, samples, path)
and removes the request.

Outside a process group a rank is RANK, else SLURM_PROCID, else 0; its world is 1, whatever WORLD_SIZE says: what does not
reduce gradients is not a group. A process without RANK reports no error of a launcher, and none beside a rank that
reported one.
"""
