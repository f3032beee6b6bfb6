"""The whole of GRPO for a vision-language model in one file: generate, score, compare, train. Read it top to bottom.

    python examples/minimal_grpo.py                  the embedded task; 45 s to two minutes on two idle cores
    python examples/minimal_grpo.py --pretrain Qwen/Qwen2.5-VL-3B-Instruct --learning_rate 1e-6 --prompt_data rows.jsonl

One process, one device, an ordinary optimizer. The pieces are those of the full trainer, which takes the same steps and
adds what large runs need: vLLM, ZeRO, checkpoints, evaluation, a reference model, reports (examples/train_grpo_vl.py).

Shapes: P prompts, G samples of each, B = P * G samples, S tokens of the longest sequence, A of the longest answer.
"""

from __future__ import annotations

import argparse
import time

import torch
from deepspeed.accelerator import get_accelerator  # only names the device: CPU, CUDA, ...

from lightrft_visual.algorithms.advantages import get_advantage_calculator
from lightrft_visual.algorithms.policy_losses import LossInputs, global_denominators, policy_loss
from lightrft_visual.config import registry
from lightrft_visual.config.vl import AlgorithmConfig, DataConfig, ModelConfig, RunConfig
from lightrft_visual.data.prompts import PromptDataset, RowChecks
from lightrft_visual.data.rendering import render_prompt
from lightrft_visual.data.sampler import PromptSampler
from lightrft_visual.experience.rollouts import PromptBatch, Rollout, SamplingSettings, ScoringRule, collate
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.loading import Checkpoint, load_transformer, open_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.engine import RolloutStage
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.trainer.fast_exp_maker import MultimodalDataProcessor
from lightrft_visual.trainer.replay_buffer import NaiveReplayBuffer


def score(completions: list[str], references: list[str]) -> list[float]:
    """The reward: 1 for the right answer, else 0. The full trainer takes it too: --reward_fn minimal_grpo.py:score"""
    return [float(answer.strip().lower() == right.lower()) for answer, right in zip(completions, references)]


def main(argv: list[str] | None = None) -> None:
    """Train, and print a line a step."""
    args = parse_arguments(argv)
    device = torch.device(get_accelerator().current_device_name())
    algorithm = AlgorithmConfig(advantage_estimator="group_norm", init_kl_coef=0.0)  # GRPO without a reference model
    sampling = SamplingSettings(n=args.n_samples_per_prompt, max_new_tokens=args.generate_max_len)

    # The model. The actor scores answers and, by the engine around it, generates them: one set of weights.
    folder = registry.checkpoint_folder(ModelConfig(), args.pretrain, "embedded")
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    transformer = load_transformer(checkpoint.path, ModelConfig(), torch.float32)
    actor = Actor(transformer, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids).to(device)
    optimizer = torch.optim.AdamW(actor.parameters(), args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    # The way from questions to answers: images are preprocessed, and their placeholders expanded, once a prompt.
    processor = MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, args.prompt_max_len)
    engine = TransformersEngine(actor, checkpoint.tokenizer, args.micro_batch_size)
    stage = RolloutStage(engine, processor, args.seed)
    prompts = prompt_batches(args, checkpoint)

    # The way from rewards to batches of training.
    calculator = get_advantage_calculator(algorithm.advantage_estimator, algorithm)
    buffer = NaiveReplayBuffer(args.micro_batch_size, seed=args.seed)

    rewards = []
    for step in range(args.max_steps):
        started = time.perf_counter()

        # 1. Generate: G answers to each of P questions.
        rollouts = stage.generate(next(prompts), sampling, policy_version=step)

        # 2. Score each answer.
        references = [rollout.prompt.reference for rollout in rollouts]
        for rollout, reward in zip(rollouts, score([rollout.text for rollout in rollouts], references)):
            rollout.reward = reward

        # 3. Compare the answers to one question with each other: (reward - mean) / std of the group.
        buffer.append(with_advantages(rollouts, calculator, checkpoint, args.generate_max_len))

        # 4. Train: better answers than the group's mean become likelier, worse ones less likely.
        loss, grad_norm = update(actor, optimizer, buffer, algorithm, sampling.scoring, args, step)
        buffer.clear()

        rewards.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
        length = sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts)
        print(
            f"step {step + 1} reward {rewards[-1]:.4f} loss {loss:.6e} grad_norm {grad_norm:.6e} tokens {length:.2f} "
            f"seconds {time.perf_counter() - started:.1f}",
            flush=True,
        )
    few = max(1, len(rewards) // 6)
    print(f"mean reward of the first {few} steps {mean(rewards[:few]):.3f}, of the last {mean(rewards[-few:]):.3f}")


def prompt_batches(args: argparse.Namespace, checkpoint: Checkpoint):
    """Batches of P rendered questions with their images, shuffled, without end."""
    run = RunConfig(data=DataConfig(prompt_data=args.prompt_data))
    if args.prompt_data in registry.tasks:  # the built-in task: its file takes the place of its name
        registry.tasks.load(args.prompt_data)(run)
    data, family = run.data, type(checkpoint.family)
    model_input = checkpoint.processor or checkpoint.tokenizer
    checks = RowChecks(model_input=model_input, prompt_max_len=args.prompt_max_len, media=family)
    dataset = PromptDataset.for_training(data, checks)
    sampler = PromptSampler(dataset.sizes, args.rollout_batch_size, seed=args.seed)
    number = 0  # of the next prompt in this run: what seeds and groups go by
    while True:
        rows = [dataset.load(index) for index in sampler.next_batch()]
        yield PromptBatch.of(
            [render_prompt(row, model_input, data, family) for row in rows],
            images=[row.images for row in rows],
            references=[row.reference for row in rows],
            ids=torch.arange(number, number + len(rows)),
        )
        number += len(rows)


def with_advantages(rollouts: list[Rollout], calculator, checkpoint: Checkpoint, max_new_tokens: int):
    """The samples as one padded batch with advantages (B, A): prompts padded on the left, answers on the right."""
    experience = collate(rollouts, checkpoint.tokenizer.pad_token_id, checkpoint.vision)
    rewards = [experience.info["reward"]]  # (B) of each batch of the step, which is one here
    _, (final,) = calculator.preprocess_rewards(rewards, [experience], max_new_tokens)
    experience.advantages, experience.returns, _ = calculator.compute(experience, final, gamma=1.0, generate_kwargs={})
    return experience


def update(
    actor: Actor,
    optimizer: torch.optim.Optimizer,
    buffer: NaiveReplayBuffer,
    algorithm: AlgorithmConfig,
    rule: ScoringRule,
    args: argparse.Namespace,
    step: int,
) -> tuple[float, float]:
    """One optimizer step on all samples of the buffer: (loss, norm of the gradient).

    The losses of micro-batches are divided by the tokens of all of them, so how the samples are cut does not matter.
    """
    total = 0.0
    batches = list(buffer.batches(seed=args.seed + step))
    denominators = global_denominators([batch.action_mask for batch in batches], args.generate_max_len)
    for batch in batches:
        log_probs = actor(ModelInputs.of(batch), rule, with_entropy=False).log_probs  # (B, A), with gradient
        inputs = LossInputs(
            log_probs=log_probs,
            old_log_probs=log_probs.detach(),  # one update a rollout: the policy that sampled is the one that trains
            advantages=batch.advantages,
            action_mask=batch.action_mask,
        )
        loss = policy_loss(inputs, algorithm, denominators).loss
        loss.backward()
        total += loss.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total, grad_norm.item()


def mean(values: list[float]) -> float:
    """Of one or more numbers."""
    return sum(values) / len(values)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Names and meanings are those of the full trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", default="embedded", help="hub name or folder of a model that reads images")
    parser.add_argument("--prompt_data", default="embedded", help="rows with prompt, images, reference (docs/data.md)")
    parser.add_argument("--rollout_batch_size", type=int, default=32, help="prompts of a step (P)")
    parser.add_argument("--n_samples_per_prompt", type=int, default=8, help="answers to each (G)")
    parser.add_argument("--micro_batch_size", type=int, default=64, help="samples generated or trained on together")
    parser.add_argument("--prompt_max_len", type=int, default=1024, help="tokens of a prompt, images expanded")
    parser.add_argument("--generate_max_len", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--learning_rate", type=float, default=5e-4, help="1e-6 for models of billions of parameters")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
