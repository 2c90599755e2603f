"""Lightning's Trainer on a small network; it starts its second rank itself. `callback`: with tula's."""

import sys

import lightning
import torch
import tula_hooks
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, _):
        self.log("loss", self.training_step(batch, _), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


folder, devices, epochs = sys.argv[1:4]
data = TensorDataset(torch.randn(256, 8), torch.randint(4, (256,)))
trainer = lightning.Trainer(
    max_epochs=int(epochs),
    accelerator="cpu",
    devices=int(devices),
    strategy="ddp" if int(devices) > 1 else "auto",
    accumulate_grad_batches=2,
    default_root_dir=folder,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[tula_hooks.lightning_callback(f"{folder}/asked.ckpt")] if "callback" in sys.argv else [],
)
trainer.fit(Net(), DataLoader(data, 4, shuffle=True), DataLoader(data, 32))
print("FINISHED", file=sys.stderr)
