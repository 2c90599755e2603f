"""Hooks for a script that tula cannot observe by itself: no torch optimizer, an engine, or saves at an exact step.

    import tula_hooks as tula

    optimizer = tula.wrap(optimizer, model)           # once, before the loop
    tula.save(lambda path: save_all(model, path))     # once: a function that writes a checkpoint; called on every rank
    tula.step(samples=len(x), loss=loss)              # at the end of each optimizer step

Keep this file in the script's folder. It needs no other package. Without tula, its functions do nothing.
`small_batch(...)` is needed only for the paper's gradient scaling (ags.preset: paper).
`trainer_callback()` (Hugging Face) and `lightning_callback()` make the trainer save a checkpoint when tula requests one.
tula observes the steps of both trainers without them.
"""

import importlib
import os
import sys

__all__ = ["asked", "lightning_callback", "save", "saved", "small_batch", "step", "trainer_callback", "wrap"]


def _shim():
    """Return the module that implements the hooks, or None if the script runs without tula."""
    if not os.environ.get("TULA_PLAN"):
        return None
    try:
        return importlib.import_module("tula_shim.by_hand")
    except ImportError:
        sys.exit("tula: TULA_PLAN is set, but the shim is not in PYTHONPATH. Start Python without -I, -E and -S.")


_tula = _shim()


def wrap(optimizer, model=None):
    """Register the optimizer and its model; return the optimizer."""
    return _tula.wrap(optimizer, model) if _tula else optimizer


def small_batch(loss):
    """Compute the small-batch gradient for train.method: ags. Call it in each step, after `backward()`.

    Args:
        loss: function that maps n to the mean loss on the first n samples of this rank's batch. It must use the module
            inside DistributedDataParallel: `lambda n: loss_of(model.module(x[:n]), y[:n])`. It is called only when needed.
    """
    if _tula:
        _tula.small_batch(loss)


def step(samples, loss=None, lr=None):
    """Report the end of an optimizer step.

    Args:
        samples: number of samples on which this rank trained in the step.
        loss: loss of the step, a number or a tensor.
        lr: learning rate of the step; None: read from the torch optimizer.
    """
    if _tula:
        _tula.step(samples, loss, lr)


def save(callback):
    """Register a function that saves the training to a path. If tula requests a checkpoint, `step` calls it on all ranks after the same step."""
    if _tula:
        _tula.on_save(callback)


def asked():
    """Return "save" or "stop" if tula requests this after the current optimizer step, else "". For callbacks of trainers."""
    return _tula.asked() if _tula else ""


def saved(path):
    """Report that the requested checkpoint is in `path`; exit if tula requested a stop."""
    if _tula:
        _tula.saved(path)


def trainer_callback():
    """Return a callback for Hugging Face's Trainer: `Trainer(..., callbacks=[tula_hooks.trainer_callback()])`."""
    from transformers import TrainerCallback

    class Tula(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            control.should_save = control.should_save or bool(asked())

        def on_save(self, args, state, control, **more):
            if asked():
                saved(f"{args.output_dir}/checkpoint-{state.global_step}")

    return Tula()


def lightning_callback(path):
    """Return a callback for Lightning's Trainer, which saves to `path` when tula requests a checkpoint."""
    from lightning import Callback

    class Tula(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if asked():
                trainer.save_checkpoint(path)
                saved(path)

    return Tula()
