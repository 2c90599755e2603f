"""Hugging Face's Trainer on a small network, as its documentation has it. `callback`: with tula's."""

import sys

import torch
import tula_hooks
from transformers import Trainer, TrainingArguments

torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return {"x": torch.full((8,), index / 256), "labels": index % 4}


folder, epochs = sys.argv[1:3]
arguments = TrainingArguments(
    folder,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=int(epochs),
    optim="sgd",
    learning_rate=0.1,
    use_cpu=True,
    eval_strategy="steps",
    eval_steps=9,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
callbacks = [tula_hooks.trainer_callback()] if "callback" in sys.argv else []
Trainer(model=Net(), args=arguments, train_dataset=Data(), eval_dataset=Data(), callbacks=callbacks).train()
print("FINISHED", file=sys.stderr)
