"""flow_grpo: scorers that a factory makes, over a tensor of pictures; total and parts in one dict; GenEval's five."""

import io

import numpy as np
import torch
from PIL import Image


def jpeg_size():
    def _fn(images, prompts, metadata):
        if isinstance(images, torch.Tensor):
            images = (images * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
            images = images.transpose(0, 2, 3, 1)
        sizes = []
        for image in images:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, format="JPEG", quality=95)
            sizes.append(buffer.tell() / 1000)
        return np.array(sizes), {}

    return _fn


def redness(device):
    assert isinstance(device, torch.device)

    def _fn(images, prompts, metadata):
        assert all(isinstance(row, dict) for row in metadata)
        return images[:, 0].mean(dim=(1, 2)), {}

    return _fn


def multi(images, prompts, metadata):
    red, green = images[:, 0].mean(dim=(1, 2)).tolist(), images[:, 1].mean(dim=(1, 2)).tolist()
    avg = [r + 0.5 * g for r, g in zip(red, green)]
    return {"red": red, "green": green, "colors_accuracy": [1.0, -10], "position_accuracy": [-10, -10], "avg": avg}, {}


def geneval(images, prompts, metadatas, only_strict):
    assert only_strict is True
    ones = [1.0] * len(prompts)
    return [0.5] * len(prompts), ones, [0.0] * len(prompts), {"colors": ones}, {"colors": ones}


def video(images, prompts, metadata):
    assert images.dim() == 5 and images.shape[2] == 3
    return images.mean(dim=(1, 2, 3, 4)), {}
