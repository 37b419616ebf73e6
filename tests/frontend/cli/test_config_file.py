"""`--config FILE`: the command line before the file, the file before defaults, and what is wrong with file and line."""

import pytest
from launch_lines import parsed

from quire.frontend.cli import serve_command


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_file_before_defaults_and_the_command_line_before_the_file(config):
    path = config("""
# comments are fine
model: Qwen/Qwen3-0.6B
port: 9000
max_model_len: 8k
served-model-name: [a, b]
enforce-eager: true
enable-prefix-caching: false
hf-overrides: {rope_scaling: {factor: 2.0}}
override-generation-config: '{"temperature": 0.5}'
allowed-origins: ["https://a"]
api-key: secret
dtype: half
seed: null
trust-remote-code: true
enable-mm-embeds: false
uvicorn-log-level: warning
disable-uvicorn-access-log: true
gpu-memory-utilization: 0.5
""")
    args = parsed("--config", path)
    assert (args.model_flag, args.port, args.max_model_len, args.served_model_name) == (
        "Qwen/Qwen3-0.6B",
        9000,
        8000,
        ["a", "b"],
    )
    assert (args.enforce_eager, args.enable_prefix_caching, args.dtype, args.seed) == (True, False, "float16", 0)
    assert args.hf_overrides == {"rope_scaling": {"factor": 2.0}} and args.override_generation_config == {"temperature": 0.5}
    assert args.allowed_origins == ("https://a",) and args.api_key == ["secret"] and args.gpu_memory_utilization == 0.5
    assert [note.split()[0] for note in args.notes] == ["--trust-remote-code", "--no-enable-mm-embeds"]

    args = parsed(
        "other/model", f"--config={path}", "--port=1", "--no-enforce-eager", "--api-key", "mine", "--log-level", "error"
    )
    assert (args.model, args.model_flag, args.port, args.enforce_eager) == ("other/model", None, 1, False)
    assert (args.api_key, args.log_level, args.max_model_len) == (["mine"], "error", 8000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: 1\nmax-model-length: 3\n", "line 2: unknown key 'max-model-length'; did you mean max-model-len?"),
        ("port: 1\n\nport: 2\n", "line 3: port is in line 1 already"),
        ("max_model_len: 1\nmax-model-len: 2", "line 2: max-model-len is in line 1 already"),
        ("port: [1, 2]", "line 1: argument --port"),
        ("host: a\nport: high\n", "line 2: argument --port: a port is between"),
        ("nnodes: 2", "line 1: --nnodes 2 is not supported"),
        ("enable-mm-embeds: true", "line 1: --enable-mm-embeds is not supported"),
        ("hf-overrides: 3", "line 1: argument --hf-overrides"),
        ("port: 1\n  host: x\n", "line 2: this is not YAML"),
        ("port: !!python/object/apply:os.system ['true']", "line 1: this is not YAML"),
        ("seed: !!timestamp x", "this is not YAML: a value does not fit its tag"),
        ("hf-overrides: {a: 2026-11-29}", "line 1: hf-overrides: this value cannot be written as JSON"),
        ("hf-overrides: &a {a: *a}", "line 1: this is not YAML: found unconstructable recursive node"),
        ("- port", "a mapping of flags to values is needed"),
        ("3: 4", "line 1: a key is a flag's name"),
        ("config: other.yaml", "line 1: config has no place"),
        ("port: \x00", "this is not YAML"),
        ("enforce-eager: 3", "line 1: argument --enforce-eager"),
        ("enforce-eager: maybe", "a switch takes no value, in a file true or false, but got 'maybe'"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(config, capsys, text, said):
    path = config(text)
    with pytest.raises(SystemExit) as end:
        parsed("--config", path)
    err = capsys.readouterr().err
    assert end.value.code == 2 and path in err and said in err and err.count("\n") == 1


def test_flags_beside_the_file_are_looked_at_too(config, capsys):
    with pytest.raises(SystemExit):
        parsed("--enable-mm-embeds", "--config", config("port: 1\n"))
    assert "--enable-mm-embeds is not supported" in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys, tmp_path):
    with pytest.raises(SystemExit):
        parsed("--config", str(tmp_path / "no.yaml"))
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed("--config")
    assert "--config" in capsys.readouterr().err


def test_an_empty_file_changes_nothing(config):
    before = vars(parsed())
    assert {n: v for n, v in vars(parsed("--config", config("# nothing\n"))).items() if before[n] != v}.keys() == {
        "config",
        "parser",
    }


def test_keys_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(serve_command.KEY_VARIABLE, "from environment")
    assert serve_command._keys(parsed()).ordinary == ["from environment"]
    assert serve_command._keys(parsed("--api-key", "a")).ordinary == ["a"]
    (tmp_path / "keys").write_text("b\n\nc\n")
    assert serve_command._keys(parsed("--api-key-file", str(tmp_path / "keys"))).ordinary == ["b", "c"]
    monkeypatch.setenv(serve_command.KEY_VARIABLE, "")
    assert serve_command._keys(parsed()).ordinary == []
