"""A small recorded run, as the report's tests need it."""

import random

from PIL import Image, ImageDraw

from lightrft_visual.observe.recorder import RunRecorder


def scene(seed: int) -> Image.Image:
    rng = random.Random(seed)
    image = Image.new("RGB", (56, 56), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 3)):
        x, y = rng.randint(2, 38), rng.randint(2, 38)
        draw.ellipse((x, y, x + 14, y + 14), fill=rng.choice(["red", "green", "blue"]))
    return image


def rollout_records(step: int, count: int = 12) -> list[dict]:
    return [
        {
            "prompt": f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many? ({index})<|im_end|>\n",
            "response": str(index % 3),
            "reference": "1",
            "reward": float(index % 3 == 1),
            "components": {"exact": float(index % 3 == 1), "format": 1.0},
            "response_length": 2,
            "images": [scene(100 * step + index)],
            "sample_id": index,
        }
        for index in range(count)
    ]


def make_run(folder, steps: int = 30, seed: int = 1) -> RunRecorder:
    rng = random.Random(seed)
    run = RunRecorder(folder)
    run.write_env()
    config = f"train:\n  seed: {seed}\nreward:\n  hf_token: topsecretvalue\n"
    (folder / "config.resolved.yaml").write_text(config)
    for step in range(steps + 1):
        if step:
            times = {"time_generate": 0.2, "time_reward": 0.1, "time_train": 0.3, "time_step": 0.7}
            run.log_step(step, {"reward_mean": step / steps, "loss": rng.gauss(0, 1), "kl": 0.01, **times})
        if step % 10 == 0:
            run.log_eval(step, {"eval_reward": step / steps, "eval_reward_greedy": step / steps, "eval_count": 0.5})
            run.save_rollouts(step, rollout_records(step), "eval_step")
    run.save_contact_sheet(steps, rollout_records(0, 4))
    return run
