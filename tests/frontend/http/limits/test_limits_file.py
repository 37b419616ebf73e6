"""--limits: which key has which limits, and what is wrong with a file, by entry and field."""

import hashlib

import msgspec
import pytest

from quire.frontend.http.limits.key_limits import KeyLimits
from quire.frontend.http.limits.limits_file import parse_limits, read_limits
from quire.frontend.http.store.bounds import KeyBounds
from quire.ipc.messages.frontend import Tenant

A, B, C, D = (hashlib.sha256(key.encode()).hexdigest() for key in "abcd")
FILE = f"""
{A}: search
{B.upper()}: search
{C}:
  name: nightly
  weight: 0.5
  max_running: 8
  max_waiting: 0
  tokens_per_minute: 60000
  best_priority: 5
  cache_salt: ours
  max_files: 10
  max_files_mib: 3
search:
  weight: 4
  cache_salt: ours
  admin: true
"*":
  max_running: 2
""".encode()


def test_each_key_has_its_limits():
    limits = msgspec.json.decode(msgspec.json.encode(parse_limits(FILE)), type=KeyLimits)
    a, b, c, d = map(limits.access, (A, B, C, D))
    assert a == b and a.admin and a.tenant == Tenant("name search", "search", weight=4.0)
    assert c.tenant == Tenant("name nightly", "nightly", 0.5, 8, 0, 60_000.0, 5) and c.best_priority == 5 and not c.admin
    assert d.tenant == Tenant(f"key {D}", f"key-{D[:8]}", max_running=2) and not d.admin
    assert a.salt == c.salt != d.salt != limits.access("e").salt
    assert limits.files(C) == KeyBounds(10, 3 << 20) and limits.files(D) == limits.files(A) == KeyBounds(1000, None)


def test_a_name_is_no_digest_and_no_other_keys_name():
    limits = parse_limits(f"{A}: {{name: x}}\n'*': {{}}".encode())
    assert limits.access(A).tenant.name != limits.access("x").tenant.name


def test_without_a_file_each_key_is_a_tenant_with_nothing_of_its_own():
    limits = KeyLimits()
    assert limits.access("") == limits.access("")
    assert limits.access("").tenant is None and limits.access("").salt is None and limits.files("") is None
    assert limits.access(A).tenant == Tenant(A, f"key-{A[:8]}") and limits.access(A).salt is None
    assert limits.files(A) == KeyBounds()


def test_without_keys_the_rest_of_a_file_is_for_all():
    limits = parse_limits(b"'*': {max_running: 3}")
    assert limits.access("").tenant.max_running == 3 and limits.access("").salt is not None
    assert parse_limits(b"").rest == KeyLimits().rest and parse_limits(b"").has_file


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "must map"),
        ("x", "must map"),
        ("a: {weight: 1}", "'a': no key has this name"),
        (f"{A}: {{weights: 1}}", "'weights' is none of name, weight"),
        (f"{A}: {{weight: 0}}", "weight must be a number"),
        (f"{A}: {{weight: .nan}}", "weight must be a number"),
        (f"{A}: {{weight: true}}", "weight must be a number"),
        (f"{A}: {{max_running: 0}}", "max_running must be an integer, at least 1"),
        (f"{A}: {{max_waiting: 1.5}}", "max_waiting must be an integer"),
        (f"{A}: {{tokens_per_minute: '5'}}", "tokens_per_minute must be an integer"),
        (f"{A}: {{best_priority: {1 << 40}}}", "best_priority must be"),
        (f"{A}: {{admin: 1}}", "admin must be true or false"),
        (f"{A}: {{cache_salt: 5}}", "cache_salt must be a text"),
        (f'{A}: {{cache_salt: "x\\0y"}}', "cache_salt must be a text"),
        (f"{A}: 5", "an entry holds limits"),
        (f"{A}: 'two words'", "a name is"),
        (f"{A}: {B}", "a name is"),
        (f"{A}: x\n{B}: x", "'x': several keys have this name"),
        (f"{A}: {{name: x, weight: 2}}\nx: {{}}", "its limits are those of 'x'"),
        (f"{A}: x\n{A}: y", "is there twice"),
        ("'*': {name: x}", "'name' is none of weight"),
        ("two words: {}", "an entry is a key's SHA-256"),
        ("sk-not-a-digest-but-a-key: {}", "no key has this name"),
        ("? [a]\n: {}", "a key must be a text"),
        ("a: &x [*x]", ""),
        ("{", "flow node"),
        ("!!python/object/apply:os.system ['true']", "constructor"),
        ("[" * 5000, ""),
        ("\x00", "special characters"),
        (f"{A}: !!timestamp x", "a value does not fit its tag"),
        (f"{A}: {{weight: !!int ''}}", "a value does not fit its tag"),
    ],
)
def test_what_is_wrong_is_named(text, says, tmp_path):
    path = tmp_path / "limits.yaml"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=r"^--limits ") as error:
        read_limits(str(path))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_limits(str(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"\xe9: {}")
    with pytest.raises(ValueError, match="--limits"):
        read_limits(str(tmp_path / "latin"))


def test_a_digest_of_digits_alone_is_a_digest():
    digits = "1" * 64
    assert parse_limits(f"{digits}: {{max_running: 1}}".encode()).access(digits).tenant.max_running == 1


def test_a_key_may_be_bound_to_some_models():
    limits = parse_limits(f"{A}:\n  models: [base, 'sql-*']\n{B}: {{}}\n".encode())
    limits = msgspec.json.decode(msgspec.json.encode(limits), type=KeyLimits)
    assert [limits.may_use(A, name) for name in ("base", "sql-1", "sql", "basement", "")] == [True, True, False, False, False]
    assert limits.may_use(B, "anything") and limits.may_use(C, "anything")
    for wrong in ("sql", "[1]", "['']", "{a: b}"):
        with pytest.raises(ValueError, match="models must be a list of names"):
            parse_limits(f"{A}:\n  models: {wrong}\n".encode())
