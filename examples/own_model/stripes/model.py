"""The model: any torch.nn.Module will do."""

from torch import Tensor, nn


class StripeNet(nn.Module):
    """Two convolutions and one linear layer.

    Args:
        num_classes: outputs; tula passes it where the dataset tells it.
        width: channels; job.yaml gives it in model.args.
    """

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, H, W) to logits (N, num_classes)."""
        features: Tensor = self.features(images)
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits
