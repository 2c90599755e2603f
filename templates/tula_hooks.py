"""Three lines for a training that tula cannot watch by itself: loops without a torch optimizer, engines, exact saves.

    import tula_hooks as tula

    optimizer = tula.wrap(optimizer, model)           # once, before the loop
    tula.save(lambda path: save_all(model, path))     # once: what writes a checkpoint; called on every rank
    tula.step(samples=len(x), loss=loss)              # at the end of each optimizer step

This file is yours: keep it beside the script. It needs nothing, and outside of tula its functions do nothing.
`small_batch(...)` is for gradient scaling in the paper's form alone.
`trainer_callback()` (Hugging Face) and `lightning_callback()` save when tula asks, with the trainer's own means; the steps
of both are seen without them.
"""

import importlib
import os
import sys

__all__ = ["asked", "lightning_callback", "save", "saved", "small_batch", "step", "trainer_callback", "wrap"]


def _shim():
    """Return tula's side, or None outside of it."""
    if not os.environ.get("TULA_PLAN"):
        return None
    try:
        return importlib.import_module("tula_shim.by_hand")
    except ImportError:
        sys.exit("tula: TULA_PLAN is set and the shim is not on PYTHONPATH: is it python -I, -E or -S?")


_tula = _shim()


def wrap(optimizer, model=None):
    """Tell which optimizer trains which model; return the optimizer."""
    return _tula.wrap(optimizer, model) if _tula else optimizer


def small_batch(loss):
    """Let gradient scaling (train.method: ags) take the gradient of a small batch. After `backward()`, in each step.

    Args:
        loss: n -> the mean loss on the first n samples of this rank's batch, by the module inside DistributedDataParallel:
            `lambda n: loss_of(model.module(x[:n]), y[:n])`. It is called in the few steps that want it.
    """
    if _tula:
        _tula.small_batch(loss)


def step(samples, loss=None, lr=None):
    """Tell that an optimizer step is over.

    Args:
        samples: that this rank has trained on in it.
        loss: of the step, a number or a tensor.
        lr: that it used; left out, it is read from a torch optimizer.
    """
    if _tula:
        _tula.step(samples, loss, lr)


def save(callback):
    """Give what saves the training to a path. `step` calls it when tula wants a checkpoint, on all ranks after the same step."""
    if _tula:
        _tula.on_save(callback)


def asked():
    """Return "save" or "stop" where tula wants that after the optimizer step that is over, else "". For trainers' callbacks."""
    return _tula.asked() if _tula else ""


def saved(path):
    """Tell that the checkpoint that `asked` asked for is in `path`; ends the process where it asked to stop."""
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
    """Return a callback for Lightning's Trainer, which saves to `path` when tula asks."""
    from lightning import Callback

    class Tula(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if asked():
                trainer.save_checkpoint(path)
                saved(path)

    return Tula()
