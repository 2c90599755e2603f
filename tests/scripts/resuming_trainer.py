"""Hugging Face's Trainer with a checkpoint each epoch, which it goes on from."""

import argparse

import torch
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--num_train_epochs", type=int)
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
options = vars(parser.parse_args())
checkpoint = options.pop("resume_from_checkpoint")
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
        return 1280

    def __getitem__(self, index):
        return {"x": torch.full((8,), index / 1280), "labels": index % 4}


arguments = TrainingArguments(
    **options, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", use_cpu=True, save_strategy="epoch",
    report_to=[], disable_tqdm=True,
)  # fmt: skip
Trainer(model=Net(), args=arguments, train_dataset=Data()).train(resume_from_checkpoint=checkpoint)
