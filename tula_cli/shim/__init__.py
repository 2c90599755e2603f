"""The folder that accompanies a user's script: copied into the run, found through PYTHONPATH, never installed.

It imports nothing of tula, only the standard library and the script's torch (>= 2.0; Python >= 3.8). It does nothing if
TULA_PLAN is not set, and nothing before `import torch`. This text is the contract between a launcher and the shim,
version 1; `run/records/scripts.py` reads the files that the shim writes.

A launcher sets these variables, which torchrun, accelerate, srun and containers pass on:

    PYTHONPATH   this folder, before the previous entries
    TULA_CODE    folders of modules that come before those of the working directory; optional
    TULA_PLAN    the path of a JSON file, the plan; ranks that share a folder all read the same file

The plan (optional keys with their defaults):

    version      1
    task         name of the task;  attempt: number of its start, from 1. Both are only copied to the output
    folder       folder of the results, of this attempt alone, created by the launcher or the shim
    mode         "probe": measure and stop; "train": count steps and samples, never stop by itself; "observe": measure
                 the first steps of a job that runs anyway, change nothing, never stop it. The results are then in a
                 folder of the job, <folder>/<script>/<job>: $TULA_OBSERVED_JOB, the SLURM step, or host and process
    expected     {"world", "batch", "accumulate", "lr", "dataset"}, null or left out if nothing is claimed: copied to
                 the result and compared on tula's side (`models/claims.py`)
    warmup       steps that are not timed (5)
    steps        timed steps (15); or min_steps, max_steps and seconds: as many as fit in that time
    split_steps  steps each for synchronisation, gradient norms and local work (6; 0: skip these measurements)
    heartbeat    minimum seconds between two heartbeats (1.0);  row: between two rows of a training (10.0)
    rehearsal    mode train, a resume test: {"checkpoint": pattern, absolute; "after": steps; "ask": "", a signal's
                 name, "file:PATH" or "hooks"; "ask_at": the step at whose end a checkpoint is requested; "settled":
                 seconds (2); "first": earlier steps' checkpoints do not count (1)}: rank 0 kills itself (SIGKILL)
                 "after" steps after the first checkpoint, once that has not changed for "settled" seconds
    branch       mode train, a search for a learning rate: {"steps", "factor", "norms"}: rows hold the loss of each step,
                 as it enters torch's backward pass. After "steps" steps all ranks exit as at the end of a probe; until
                 then the learning rate rises from 1/"factor" of the script's to all of it in the first quarter, and falls
                 to 0 in the second half. steps null: the training up to the checkpoint, whose rate is not changed. norms:
                 number of first steps whose gradient norms are recorded, 0 for none
    schedule     mode train, true: rows record the state of the optimizer's torch scheduler: {"schedule": {"name",
                 "at": its steps so far, "moves": whether it will change the learning rate again, null if unknown}}
    files        folders whose files the script may write; if given, each process records the other files that it
                 changes
    save         true: poll for requests to save (mode train);  checkpoint: the path that is passed to the callback
    ags          adaptive gradient scaling around the script's optimizer, null for none: "code" (the folder with the
                 package tula_ags: the optimizers, which need Python 3.10 and torch 2.6), "settings" (as a preset
                 spells them, and "parameters"), "apply_to" ("gradient", "update"; null: by the optimizer), "b_large",
                 "b_small", "available" (samples that a rank computes at a time), "steps_per_epoch", "seed", "resumed"
                 (whether the training resumes from a checkpoint)
    ortho        orthogonalised steps of the script's optimizers, null for none: "code" as for ags, "beta2_power"
                 (batch / reference batch: the exponent applied to Adam's beta2)

Each rank writes these files, every JSON file completely or not at all:

    result-<rank>.json     when the probe is over ("why": "stopped"), the script exited by itself ("ended") or after a
                           requested save ("saved"): the measurements, a list per step. Seconds and bytes.
    begun-<rank>.json      mode train, after its first warmup + min_steps steps ("why": "begun"): the same measurements
                           of these steps, those after the warm-up as "timed"; the result of a training repeats them.
                           Mode observe: once all that a probe measures without changes is measured
    failure-<rank>.json    an uncaught exception: class ("error"), "message", traceback ("text"), rank (null if unknown; the file
                           name then has host and process id), "where": script, shim, or method if this script does not
                           support a method that the plan requests; "batch_norm": "batch", "sync" (all of them over the
                           ranks) or "", by the modules in the process
    heartbeat-<rank>.json  from the first step on: "step", "samples", "stepped_at" (Unix time of the last step),
                           "seconds" (median of the last 100 steps), "step_samples" (median of the last 20 on this
                           rank, null if unknown), "alive_at" (of the last step or batch), "lost" (why the shim gave
                           up, else null: the training continues without it), "totals" (mode observe: seconds since the
                           first step: all, waits for data, and what an evaluation, a new epoch or a save added)
    steps-<rank>.jsonl     mode train: rows {"kind": "row"}: step, samples (of this rank), lr, loss, time, and "ags"
                           (factors and shares since the last row, "so_far" of all steps); {"kind": "gap"}: a step that
                           included an evaluation, a save or a new epoch: step, samples, "before" it, time, seconds,
                           causes, "saved" (path -> when its torch.save began); {"kind": "note"}: "text"; {"kind": "load"}: "path" of a file that torch.load has
                           read before the first step, "written"
    files-<host>-<pid>.jsonl  with "files": {"path", "folder", "late": whether training had begun, "existed": whether
                           the file existed before any process of this start opened it, "copy": of the earlier file; null
                           with existed if it was too large}, before each change; {"stepped": Unix time of the first step}
    before/                with "files": the copies, and for each path that a process has created a file *.created
    rehearsal.json         rank 0 of a resume test, once there is a checkpoint: the "steps" and its "samples" before
                           it, "dataset" (samples that the data loader reports), and whether the process was killed:
                           "killed"

To request a checkpoint, a supervisor writes `save.json`, {"then": "go on" | "stop"}, into the folder. All ranks see the
request after the same step and call the callback given to `tula_hooks.save`; rank 0 then writes saved.json (step,
samples, path) and removes the request.

Outside a process group a rank is RANK, else SLURM_PROCID, else 0; its world is 1, whatever WORLD_SIZE says: processes
that do not reduce gradients are not a group. A process without RANK does not report a launcher's error, and reports
none after a rank has reported one.
"""
