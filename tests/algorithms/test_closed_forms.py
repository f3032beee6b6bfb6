"""Every algorithm has a test against its closed form, or against its authors' or a stock implementation's numbers."""

import ast
from itertools import chain
from pathlib import Path

import pytest

from lightrft_visual.config import registry

TESTS = Path(__file__).parents[1]
FILES = chain(
    *map(TESTS.glob, ("algorithms/**/test_*.py", "rollout/test_diffusion_*.py", "trainer/features/test_*.py"))
)

# registry, or what belongs to no entry -> lines of names, and the tests of each of them
FORMS = {
    "advantage_estimators": """
        gae: test_gae_by_hand test_gae_with_lambda_one_is_the_return_minus_the_value
        gdpo: test_rewards_are_normalised_apart_then_summed_then_over_the_batch
        distillation: test_rewards_teach_nothing_and_each_token_has_its_own_advantage
            test_the_gradient_is_that_of_the_reverse_kl
        group_norm, dr_grpo, rloo, reinforce, reinforce_baseline, cpgd: test_one_group_by_hand
    """,
    "policy_losses": """
        ppo: test_symmetric_clip test_clip_higher test_dual_clip_bounds_negative_advantages_only
        gspo: test_gspo_is_the_sequence_form test_gspo_clips_whole_sequences
        gmpo: test_gmpo_is_the_geometric_mean test_gmpo_clips_tokens_in_log_space
        cispo: test_every_token_keeps_a_gradient test_no_lower_bound_from_eps_one
        sapo: test_gate_of_the_paper
        cpgd: test_clipped_log_ratio test_drift_pulls_back_with_a_capped_slope
        luspo: test_luspo_is_gspo_weighed_by_length
        dppo_tv: test_dppo_tv_by_hand
        dppo_kl: test_dppo_kl_by_hand
        vespo: test_vespo_by_hand
        clip_cov: test_clip_cov_by_hand test_clip_cov_draws_among_the_eligible
        kl_cov: test_kl_cov_by_hand test_kl_cov_takes_the_largest_covariances
    """,
    "policy_masks": """
        off_policy: test_off_policy_mask_by_hand
    """,
    "tis_modes": """
        off, token, sequence: test_weights
    """,
    "aggregations": """
        token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm: test_by_hand
    """,
    "kl_estimators": """
        k1, k2, k3: test_forms_by_hand test_k1_and_k3_have_the_exact_expectation
        k3_unbiased: test_k3_unbiased_has_the_gradient_of_the_kl_whatever_drew_the_tokens
    """,
    "diffusion_algorithms": """
        flow_grpo: test_surrogate_clips_each_sign_on_its_own_side test_kl_is_the_closed_form_and_the_forms_differ_by_dt
        mix_grpo: test_a_sliding_window_is_mixgrpos
        flow_dppo: test_flow_dppo_masks_what_is_far_and_moves_farther
        temp_flow_grpo: test_temp_flow_weights_steps_by_their_noise_and_not_the_kl
        dance_grpo: test_a_step_by_hand
        diffusion_nft: test_nft_loss_by_hand test_nft_gradient_at_the_old_policy test_decay_types
        ddpo, dpok: test_losses_of_ddim_steps_by_hand
        awm: test_awm_loss_by_the_papers_formula test_weightings_by_hand
        dgpo: test_dgpo_is_the_papers_loss_and_gradient
        crd: test_crd_is_the_authors_form
        diffusion_dpo: test_diffusion_dpo_is_the_authors_form test_pairs_are_the_best_with_the_worst
        rwr: test_reward_weighted_regression_by_hand
        diffusion_opd: test_distillation_is_the_kl_of_the_steps
        reward_fl: test_gradient_equals_finite_differences
    """,
    "beside": """
        steps of Flow-GRPO: test_a_step_by_hand
        steps of DDIM: test_ddim_is_the_stochastic_step_of_the_stock_scheduler
        NoisyRollout: test_the_schedule_is_the_papers_sigmoid test_the_noise_is_a_step_of_the_forward_process
        selective replay: test_the_draw_is_in_proportion_to_the_advantage
        CPS: test_a_step_by_hand test_cps_surrogate_is_minus_the_squared_distance
        sde_reflow: test_reflow_noises_the_predicted_data_anew
        GRPO-Guard: test_guard_leaves_the_noise_times_the_shift_of_the_mean
        entropy_target: test_the_coefficient_follows_the_entropy_by_hand_also_where_it_is_resumed
        kl_target: test_adaptive_controller_moves_towards_the_target_and_resumes
        overlong penalty: test_overlong_penalty_by_hand
    """,
}


def forms(kind: str) -> dict[str, list[str]]:
    """Tests by name. A line that is indented belongs to the one before."""
    lines = FORMS[kind].replace("\n            ", " ").strip().splitlines()
    parted = (line.strip().partition(": ") for line in lines)
    return {name: tests.split() for names, _, tests in parted for name in names.split(", ")}


@pytest.fixture(scope="module")
def tests() -> set[str]:
    nodes = (node for path in FILES for node in ast.walk(ast.parse(path.read_text())))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("kind", FORMS)
def test_no_choice_is_without_one(kind: str, tests: set[str]) -> None:
    own = getattr(registry, kind) if kind != "beside" else ()
    named = {entry.name for entry in own if isinstance(entry.target, str | None)}  # not a test's plugin
    assert kind == "beside" or named == set(forms(kind)), "list its test against a closed form in FORMS"
    assert all(forms(kind).values()) and set(chain(*forms(kind).values())) <= tests
