import pytest

from lightrft_visual.config import registry
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.registry import build_scorer, check_scorer, register_scorer


def test_unknown_name_and_setting_give_the_nearest():
    with pytest.raises(ConfigError, match="'exct'; did you mean 'exact'"):
        build_scorer("exct")
    with pytest.raises(ConfigError, match="no setting 'tolerence'; did you mean 'tolerance'"):
        check_scorer("numeric", {"tolerence": 1})
    with pytest.raises(ConfigError, match="needs the setting 'head'"):
        build_scorer("aesthetic")


def test_settings_under_the_names_of_other_systems(tmp_path):
    with pytest.raises(ConfigError, match="needs the setting 'head'"):
        build_scorer("aesthetic", {"model_name": "openai/clip-vit-large-patch14"})
    with pytest.raises(ConfigError, match=str(tmp_path)):
        build_scorer("clip_score", {"model_name": str(tmp_path / "clip")})
    with pytest.raises(ConfigError, match="no setting 'model_name'"):
        check_scorer("numeric", {"model_name": "x"})


@pytest.mark.parametrize(
    ("scorer", "settings", "told"),
    [
        ("numeric", {"tolerance": "near"}, "scorer 'numeric': tolerance is 'near': .*valid number"),
        ("vlm_judge", {"url": "http://judge/v1", "model": "m", "low": "none at all"}, "low is 'none at all'"),
        ("judge", {"model": 3}, "model is 3: .*valid string"),
        ("multi", {"components": ["exact"]}, r"components is \['exact'\]: .*valid dictionary"),
    ],
)
def test_a_built_in_scorers_setting_of_another_type_is_told_of_before_anything_loads(scorer, settings, told):
    with pytest.raises(ConfigError, match=told):
        check_scorer(scorer, settings)


def test_a_built_in_scorers_settings_come_in_the_types_it_asks_for(tmp_path):
    assert check_scorer("numeric", {"tolerance": "0.5"})[1] == {"tolerance": 0.5}
    assert check_scorer("clip_score", {"model": tmp_path})[1] == {"model": str(tmp_path)}


def test_register_function_and_class(monkeypatch):
    monkeypatch.setattr(registry.scorers, "_entries", dict(registry.scorers._entries))

    @register_scorer("length")
    def length(completions, scale=1.0):
        return [scale * len(c) for c in completions]

    assert build_scorer("length", {"scale": 2.0})(completions=["abc"]) == [6.0]
    with pytest.raises(ConfigError, match="registered already"):
        register_scorer("length")(lambda completions: [])
    with pytest.raises(ConfigError, match="registered already"):
        register_scorer("exact")(length)
