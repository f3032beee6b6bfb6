"""Every algorithm has a test against its closed form, or against its authors' or a stock implementation's numbers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lightrft_visual.config import registry

TESTS = Path(__file__).parents[1]
ADVANTAGES, LOSSES = "algorithms/test_advantages.py", "algorithms/test_policy_losses.py"
OFF_POLICY, COVARIANCE = "algorithms/test_off_policy.py", "algorithms/test_covariance.py"
MATCHING = "algorithms/diffusion/test_matching.py"
DIFFUSION, STEPS = "algorithms/diffusion/test_losses.py", "rollout/test_diffusion_steps.py"

# registry, or what belongs to no entry -> {name: (file, tests)}
FORMS = {
    "advantage_estimators": {
        "gae": (ADVANTAGES, "test_gae_by_hand", "test_gae_with_lambda_one_is_the_return_minus_the_value"),
        "gdpo": (ADVANTAGES, "test_rewards_are_normalised_apart_then_summed_then_over_the_batch"),
        "distillation": (
            ADVANTAGES,
            "test_rewards_teach_nothing_and_each_token_has_its_own_advantage",
            "test_the_gradient_is_that_of_the_reverse_kl",
        ),
        **{
            name: (ADVANTAGES, "test_one_group_by_hand")
            for name in ("group_norm", "dr_grpo", "rloo", "reinforce", "reinforce_baseline", "cpgd")
        },
    },
    "policy_losses": {
        "ppo": (LOSSES, "test_symmetric_clip", "test_clip_higher", "test_dual_clip_bounds_negative_advantages_only"),
        "gspo": (LOSSES, "test_gspo_is_the_sequence_form", "test_gspo_clips_whole_sequences"),
        "gmpo": (LOSSES, "test_gmpo_is_the_geometric_mean", "test_gmpo_clips_tokens_in_log_space"),
        "cispo": (LOSSES, "test_every_token_keeps_a_gradient", "test_no_lower_bound_from_eps_one"),
        "sapo": (LOSSES, "test_gate_of_the_paper"),
        "cpgd": (LOSSES, "test_clipped_log_ratio", "test_drift_pulls_back_with_a_capped_slope"),
        "luspo": (LOSSES, "test_luspo_is_gspo_weighed_by_length"),
        "dppo_tv": (OFF_POLICY, "test_dppo_tv_by_hand"),
        "dppo_kl": (OFF_POLICY, "test_dppo_kl_by_hand"),
        "vespo": (OFF_POLICY, "test_vespo_by_hand"),
        "clip_cov": (COVARIANCE, "test_clip_cov_by_hand", "test_clip_cov_draws_among_the_eligible"),
        "kl_cov": (COVARIANCE, "test_kl_cov_by_hand", "test_kl_cov_takes_the_largest_covariances"),
    },
    "policy_masks": {"off_policy": (OFF_POLICY, "test_off_policy_mask_by_hand")},
    "tis_modes": {
        name: (LOSSES, "test_weights", "test_off_leaves_the_loss_alone") for name in ("off", "token", "sequence")
    },
    "aggregations": {
        name: (LOSSES, "test_by_hand")
        for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    "kl_estimators": {
        name: ("algorithms/test_kl.py", "test_forms_by_hand", "test_k1_and_k3_have_the_exact_expectation")
        for name in ("k1", "k2", "k3")
    }
    | {"k3_unbiased": (OFF_POLICY, "test_k3_unbiased_has_the_gradient_of_the_kl_whatever_drew_the_tokens")},
    "diffusion_algorithms": {
        "flow_grpo": (
            DIFFUSION,
            "test_surrogate_clips_each_sign_on_its_own_side",
            "test_kl_is_the_closed_form_and_the_forms_differ_by_dt",
        ),
        "mix_grpo": ("rollout/test_diffusion_sampler.py", "test_a_sliding_window_is_mixgrpos"),
        "flow_dppo": (DIFFUSION, "test_flow_dppo_masks_what_is_far_and_moves_farther"),
        "temp_flow_grpo": (DIFFUSION, "test_temp_flow_weights_steps_by_their_noise"),
        "dance_grpo": (STEPS, "test_dance_by_hand"),
        "diffusion_nft": (
            DIFFUSION,
            "test_nft_loss_by_hand",
            "test_nft_gradient_at_the_old_policy",
            "test_decay_types",
        ),
        "ddpo": (DIFFUSION, "test_losses_of_ddim_steps_by_hand"),
        "dpok": (DIFFUSION, "test_losses_of_ddim_steps_by_hand"),
        "awm": (MATCHING, "test_awm_loss_by_the_papers_formula", "test_weightings_by_hand"),
        "dgpo": (MATCHING, "test_dgpo_is_the_papers_loss_and_gradient"),
        "crd": (MATCHING, "test_crd_is_the_authors_form"),
        "diffusion_dpo": (MATCHING, "test_diffusion_dpo_is_the_authors_form", "test_pairs_are_the_best_with_the_worst"),
        "rwr": (MATCHING, "test_reward_weighted_regression_by_hand"),
        "diffusion_opd": (DIFFUSION, "test_distillation_is_the_kl_of_the_steps"),
        "reward_fl": ("algorithms/diffusion/test_reward_fl.py", "test_gradient_equals_finite_differences"),
    },
    "beside": {
        "steps of Flow-GRPO": (STEPS, "test_flow_grpo_by_hand", "test_flow_grpo_at_sigma_one_divides_by_the_next"),
        "steps of DDIM": (STEPS, "test_ddim_is_the_stochastic_step_of_the_stock_scheduler"),
        "NoisyRollout": (
            "trainer/features/test_noisy_rollouts.py",
            "test_the_schedule_is_the_papers_sigmoid",
            "test_the_noise_is_a_step_of_the_forward_process",
        ),
        "selective replay": (
            "trainer/features/test_selective_replay.py",
            "test_the_draw_is_in_proportion_to_the_advantage",
        ),
        "CPS": (STEPS, "test_cps_by_hand", "test_cps_surrogate_is_minus_the_squared_distance"),
        "sde_reflow": (STEPS, "test_reflow_noises_the_predicted_data_anew"),
        "GRPO-Guard": (DIFFUSION, "test_guard_leaves_the_noise_times_the_shift_of_the_mean"),
        "entropy_target": (
            "trainer/features/test_entropy_target.py",
            "test_the_coefficient_follows_the_entropy_by_hand",
        ),
        "kl_target": ("algorithms/test_kl.py", "test_adaptive_controller_moves_towards_the_target_and_resumes"),
        "overlong penalty": ("algorithms/test_reward_shaping.py", "test_overlong_penalty_by_hand"),
    },
}


def names_in(file: str) -> set[str]:
    nodes = ast.walk(ast.parse((TESTS / file).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "beside"])
def test_no_choice_is_without_one(kind: str) -> None:
    own = [entry for entry in getattr(registry, kind) if isinstance(entry.target, str | None)]  # not a test's plugin
    assert {entry.name for entry in own} == set(FORMS[kind]), "list its test against a closed form in FORMS"


@pytest.mark.parametrize("kind", FORMS)
def test_they_are_there(kind: str) -> None:
    for name, (file, *tests) in FORMS[kind].items():
        assert set(tests) <= names_in(file), name
