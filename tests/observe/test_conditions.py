"""What an evaluation was made with."""

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.observe.conditions import conditions, in_words


def test_drawing_is_described_by_sampler_size_seed_scorer_prompts_and_versions():
    argv = "--eval_num_steps 12 --guidance_scale 3 --height 64 --components.ocr 1.0 --eval_seed 7".split()
    config = parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config
    found = conditions(config, ["a", "b"])
    drawn = {"eval_num_steps": 12, "guidance_scale": 3.0, "height": 64, "sampler": "ode"}
    assert drawn.items() <= found["sampling"].items() and found["seed"] == 7
    assert found["reward"] == {"components": {"ocr": 1.0}} and "torch" in found["versions"]
    assert found["prompts"]["count"] == 2
    assert found["prompts"] == conditions(config, ["a", "b"])["prompts"] != conditions(config, ["ab"])["prompts"]
    assert "eval_num_steps 12" in in_words(found) and "seed 7" in in_words(found)


def test_answering_is_described_by_its_sampling_and_secrets_are_masked():
    argv = "--temperature 0.5 --seed 3 --system_prompt Think. --engine_type hf".split()
    argv += ["--components.vlm_judge", "1.0", "--kwargs.vlm_judge.api_key", "abc123"]
    found = conditions(parse_run(RunConfig, argv).config, [])
    assert found["rollout"]["temperature"] == 0.5 and found["rollout"]["engine_type"] == "hf" and found["seed"] == 3
    assert found["data"]["system_prompt"] == "Think." and found["output"]["eval_samples_per_prompt"] == 4
    assert "abc" not in str(found) and "vlm_judge" in found["reward"]["components"]


def test_what_decides_how_samples_are_drawn_tells_two_evaluations_apart():
    drawing, answering = (DiffusionRunConfig, DIFFUSION_PRESET), (RunConfig, None)
    for kind, preset, argv in (
        (*drawing, "--guidance_scale 4 --guidance_scale_2 3"),
        (*drawing, "--source_pixels 4096"),
        (*drawing, "--frame_rate 12"),
        (*drawing, "--gold_recipe ocr"),
        (*answering, "--tis_mode token --engine_quantization fp8"),
        (*answering, "--tis_mode token --engine_kv_cache_dtype fp8"),
        (*answering, "--engine_kwargs.block_size 32"),
        (*answering, "--environment python"),
        (*answering, "--environment python --max_turns 2"),
        (*answering, "--environment python --observation_max_tokens 9"),
    ):
        words = argv.split()
        fewer, more = (conditions(parse_run(kind, own, preset=preset).config, []) for own in (words[:-2], words))
        assert fewer != more, argv
    plain = conditions(parse_run(RunConfig, []).config, [])
    assert "episodes" not in plain and not {"max_turns", "engine_kwargs", "auto"} & {*in_words(plain).split()}
