"""Lightning's Trainer with a checkpoint each epoch, which it goes on from."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--epochs", type=int)
parser.add_argument("--out")
parser.add_argument("--resume")
options = parser.parse_args()
torch.set_num_threads(1)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    max_epochs=options.epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint(options.out, save_top_k=-1)],
)  # fmt: skip
data = TensorDataset(torch.randn(1280, 8), torch.randint(4, (1280,)))
trainer.fit(Net(), DataLoader(data, options.batch, shuffle=True), ckpt_path=options.resume)
