"""Quantize a small vision model that no model library knows: an MLP-mixer, trained here on drawn digits, rounded with nothing but two functions of bakron.

    python examples/vision.py

Prints, for nearest rounding, GPTQ and bakron at the same bits, how far the model's answers on unseen images are from those before quantization.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import bakron

FONT = {  # 5 x 7, a row a number
    0: (14, 17, 19, 21, 25, 17, 14), 1: (4, 12, 4, 4, 4, 4, 14), 2: (14, 17, 1, 2, 4, 8, 31), 3: (31, 2, 4, 2, 1, 17, 14), 4: (2, 6, 10, 18, 31, 2, 2),
    5: (31, 16, 30, 1, 1, 17, 14), 6: (6, 8, 16, 30, 17, 17, 14), 7: (31, 1, 2, 4, 8, 8, 8), 8: (14, 17, 17, 14, 17, 17, 14), 9: (14, 17, 17, 15, 1, 2, 12),
}  # fmt: skip
SIDE, PATCH, WIDTH = 16, 4, 64
LEVELS, GROUP = 4, 16


class Mixer(nn.Module):
    """A two-block MLP-mixer on 16 patches of 4 x 4 pixels: every weight that matters is in an `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_tokens": nn.LayerNorm(WIDTH),
                    "tokens": nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)),
                    "norm_channels": nn.LayerNorm(WIDTH),
                    "channels": nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[b, 10]` of images `[b, 16, 16]`."""
        x = self.embed(images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(images), 16, -1))
        for block in self.blocks:
            x = x + block["tokens"](block["norm_tokens"](x).mT).mT
            x = x + block["channels"](block["norm_channels"](x))
        return self.head(x.mean(1))


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images `[count, 16, 16]` of digits at random places, of random brightness, in noise; and which digits they are."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = torch.tensor([[[row >> (4 - column) & 1 for column in range(5)] for row in FONT[digit]] for digit in range(10)]).float()
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.35 * torch.randn(count, SIDE, SIDE, generator=generator)
    places = torch.randint(2, 8, (count, 2), generator=generator).tolist()
    bright = 0.7 + torch.rand(count, generator=generator)
    for image, label, (row, column), light in zip(images, labels, places, bright):
        image[row : row + 7, column : column + 5] += light * glyphs[label]
    return images, labels


def train(steps: int = 400, batch: int = 128) -> Mixer:
    """A mixer that reads most of the digits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mixer()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    images, labels = digits(steps * batch, seed=1)
    for x, y in zip(images.split(batch), labels.split(batch)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def quantize(model: Mixer, method: str, batches: list[Tensor]) -> Mixer:
    """A copy of the model with all linears but the head rounded to 4 levels: to nearest ("rtn"), against A alone ("gptq"), against A and B ("bakron")."""
    model = copy.deepcopy(model)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "head"]
    krons = bakron.collect(model, batches, loss="sampled" if method == "bakron" else None, linears=names)
    for name, kron in krons.items():
        linear = model.get_submodule(name)
        if method == "rtn":
            grid = bakron.UniformGrid.fit(linear.weight, LEVELS, GROUP)
            linear.weight.data = grid.project(linear.weight.detach())[1]
        else:
            bakron.quantize_linear_(linear, kron.damp(), levels=LEVELS, group_size=GROUP, scale="curvature")
    return model


@torch.no_grad()
def divergence(model: Mixer, original: Mixer, images: Tensor) -> float:
    """KL(original || model) in nats an image."""
    p, q = original(images).log_softmax(-1), model(images).log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def main(steps: int = 400) -> dict[str, float]:
    """Train, quantize three times, print and return the divergences."""
    model = train(steps)
    calibration, (images, labels) = digits(2048, seed=2)[0], digits(4096, seed=3)
    found = {}
    print(f"original: {100 * float((model(images).argmax(-1) == labels).float().mean()):.1f} % of digits read")
    for method in ("rtn", "gptq", "bakron"):
        rounded = quantize(model, method, list(calibration.split(256)))
        found[method] = divergence(rounded, model, images)
        share = float((rounded(images).argmax(-1) == labels).float().mean())
        print(f"{method:>8}: KL {found[method]:.4f} nats an image, {100 * share:.1f} % of digits read")
    return found


if __name__ == "__main__":
    main()
