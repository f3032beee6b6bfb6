"""Write docs/models.md: what the tests show of each family of vision-language models.

python scripts/write_models.py          a test compares
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE, TABLE = ROOT / "docs" / "models.md", ROOT / "tests" / "models" / "families.json"
COLUMNS = {
    "padded": "padded", "text alone": "text alone", "packed": "packed", "shared prefix": "shared prefix",
    "video": "video", "LoRA": "LoRA", "ZeRO-3": "ZeRO-3", "export": "export", "hf": "engine hf", "vllm": "engine vllm",
    "sglang": "engine sglang",
}  # fmt: skip
# What the general adapter runs right; tests/models/stock_families.py builds them.
GENERAL = (
    "deepseek_vl", "exaone4_5", "idefics2", "lfm2_vl", "lighton_ocr", "llava_next_video", "ovis2", "video_llama_3",
)  # fmt: skip
HEAD = f"""# Models

Written by `scripts/write_models.py` from `tests/models/families.json`, which the tests read: each entry is a test, and
what has none is empty. CPU: tiny models of transformers' own classes, with random weights, on two cores; card: on a
GPU. Any other type is run by a general adapter, padded, and compared with its own class at the start of its first run,
or refused by name. It takes texts of most causal types, and images of
{", ".join(f"`{name}`" for name in GENERAL)}.

- **padded**: log-probs of text, one image and two images of other sizes equal those of the model's own class to 1e-5.
- **text alone**: a batch without any image does too, and runs the vision tower, which ZeRO needs.
- **packed**, **shared prefix**: several samples in one row, and the prompt of a group once, do too. Else both are
  refused.
- **video**: videos are sampled from and scored alike. Else prompts with videos are refused.
- **LoRA**: adapters in all linear layers equal peft's forward and are trained.
- **ZeRO-3**: two ranks divide the weights, agree with the model's own class, and take a step.
- **export**: what is exported opens again with the same log-probs.
- **engine hf**, **engine vllm**, **engine sglang**: log-probs of what it samples are the trainer's to 2e-5, after a
  sync of weights too.

"""


def main() -> None:
    FILE.write_text(text())
    print(FILE)


def text() -> str:
    """The page."""
    table = json.loads(TABLE.read_text())
    lines = [f"| family | model type | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for model_type, entry in table.items():
        shown = [entry["proven"].get(form, "") for form in COLUMNS]
        lines.append(f"| {entry['name']} | `{entry.get('type', model_type)}` | {' | '.join(shown)} |")
    notes = [f"**{entry['name']}**: {entry['why']}" for entry in table.values() if entry.get("why")]
    return HEAD + "\n".join(lines) + "\n\n## Why\n\n" + "\n\n".join(notes) + "\n"


if __name__ == "__main__":
    main()
