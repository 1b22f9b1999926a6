"""Nothing leaves the machine without --push, and then only what others need; the licence and the secrets are told."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import export
import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import RepositoryNotFoundError

from gemma_trainer import artefacts, hub, metadata, publishing
from gemma_trainer.errors import CannotLoad, UsageError

FACTS = {
    "task": "sft",
    "takes": ["text"],
    "base_model": {"name": "google/gemma-3-4b-it", "revision": None, "family": "gemma3", "license": "gemma"},
    "data": {"names": ["rows.jsonl"], "fingerprint": "f", "version": None, "rows": 7, "eval_rows": 0},
    "chat_template": {"version": "gemma3", "sha256": "0" * 64},
    "tokens": {"stop_token_ids": [1]},
    "max_len": 128,
    "labels": {"loss_on": "all-turns", "ignored": ["padding"]},
    "metadata": {},
}
KEPT = [
    "run.json",
    "report.html",
    "samples.json",
    "metrics.jsonl",
    "export.json",
    "optimizer.pt",
    ".env",
    "hf_token.txt",
]


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with all that one may hold."""
    folder = tmp_path / "run"
    (folder / "checkpoint-4").mkdir(parents=True)
    (folder / "checkpoint-4" / "optimizer.pt").write_text("state")
    for name in ("adapter_model.safetensors", "chat_template.jinja", "tokenizer.json", *KEPT):
        (folder / name).write_text("{}")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "google/gemma-3-4b-it"}))
    metadata.write(folder, FACTS)
    return folder


@pytest.fixture
def api(monkeypatch):
    """The hub, as far as it is asked: what was called, what repositories there are, whether they are private."""

    class Api:
        called, repositories, gated = [], {}, "manual"

        def model_info(self, name, timeout):
            return type("Info", (), {"gated": self.gated})

        def repo_info(self, repo):
            if repo not in self.repositories:
                raise RepositoryNotFoundError("no such repository", response=_response())
            return type("Info", (), {"private": self.repositories[repo]})

        def __getattr__(self, name):
            return lambda *words, **more: self.called.append((name, words, more)) or "https://hub/me/mine"

    Api.called, Api.repositories = [], {}
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    return Api


def _response():
    import httpx

    return httpx.Response(404, request=httpx.Request("GET", "https://hub"))


def _broken():
    import httpx

    raise httpx.ConnectError("connection lost")


def publish(folder, **more) -> dict:
    return export.hub(export.HubFlags(**({"path": str(folder), "repo": "me/mine"} | more)))


def told(result, check: str) -> str:
    return next(found["told"] for found in result["checks"] if found["check"] == check)


def test_nothing_is_uploaded_unless_it_is_asked_for(run, api):
    result = publish(run)
    assert not api.called and not result["pushed"] and result["private"] and "exit_code" not in result
    assert not {*KEPT, "checkpoint-4/"} & set(result["files"]) and {*KEPT, "checkpoint-4/"} <= set(result["left_out"])
    wanted = {"README.md", "adapter_model.safetensors", "adapter_config.json", "training_metadata.json"}
    assert wanted <= set(result["files"]) and not result["card_made"]
    assert result["base"] == {"name": "google/gemma-3-4b-it", "license": "gemma", "gated": True}
    licence = told(result, "licence")
    assert "gemma, of google/gemma-3-4b-it, which is gated" in licence
    assert "NOTICE" in licence  # an adapter is a change of the model, which the terms are of, too


def test_notices_go_along_however_they_are_spelled(run, api):
    for name in ("Notice.txt", "LICENSE", "odd[1].gguf"):
        (run / name).write_text("x")
    result = publish(run, push=True)
    _, (_, _, sent) = api.called
    assert {"Notice.txt", "LICENSE", "odd[1].gguf"} <= set(result["files"])
    assert [name for name in result["files"] if not any(fnmatch(name, one) for one in sent["allow_patterns"])] == []


def test_a_push_makes_a_private_repository_and_uploads_what_was_listed(run, api):
    result = publish(run, push=True)
    (created, words, how), (uploaded, _, what) = api.called
    assert (created, words, how) == ("create_repo", ("me/mine",), {"private": True, "exist_ok": True})
    assert uploaded == "upload_folder" and sorted(what["allow_patterns"]) == sorted(result["files"])
    assert result["pushed"] and result["url"] == "https://hub/me/mine"
    api.called.clear()
    publish(run, push=True, public=True)
    assert api.called[0][2]["private"] is False


def test_a_public_repository_must_be_meant(run, api):
    api.repositories["me/mine"] = False
    with pytest.raises(UsageError, match="say --public"):
        publish(run, push=True)
    assert not api.called
    api.repositories["me/mine"] = True
    assert publish(run, push=True)["pushed"]


def test_a_push_needs_a_token_and_the_hub(run, api, monkeypatch):
    monkeypatch.setattr(hub, "unreachable", lambda: "offline by HF_HUB_OFFLINE")
    with pytest.raises(CannotLoad, match="offline"):
        publish(run, push=True)
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    monkeypatch.setattr(api, "create_repo", lambda *_, **__: _broken(), raising=False)
    with pytest.raises(CannotLoad, match="not finished .connection lost"):
        publish(run, push=True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(CannotLoad, match="hf auth login") as caught:
        publish(run, push=True)
    assert caught.value.exit_code == 5 and not api.called


@pytest.mark.parametrize(
    ("file", "content", "check"),
    [
        ("training_metadata.json", json.dumps(FACTS | {"metadata": {"key": "hf_" + "a" * 34}}), "secrets"),
        ("README.md", "---\nlicense: gemma\n---\n-----BEGIN RSA PRIVATE KEY-----", "secrets"),
        ("adapter_config.json", json.dumps({"base_model_name_or_path": str(Path(__file__).parent)}), "paths"),
        ("adapter_config.json", json.dumps({"base_model_name_or_path": "/home/who/gone/gemma"}), "paths"),
        ("adapter_config.json", json.dumps({"base_model_name_or_path": "runs/one/base-model"}), "paths"),
        ("training_metadata.json", json.dumps(FACTS | {"a": [{"b": "C:\\Users\\who\\rows.jsonl"}]}), "paths"),
        ("README.md", "---\nlicense: gemma\nbase_model: /home/who/gemma\n---\n", "paths"),
        ("training_metadata.json", json.dumps(FACTS | {"a": "github_pat_" + "a" * 40}), "secrets"),
        ("README.md", "# no metadata", "card"),
        ("chat_template.jinja", None, "chat template"),
        ("adapter_model.safetensors", None, "weights"),
    ],
)
def test_what_must_not_leave_stops_the_push(run, api, file, content, check):
    (run / file).unlink() if content is None else (run / file).write_text(content)
    result = publish(run, push=True)
    failed = [found["check"] for found in result["checks"] if found["passed"] is False]
    assert failed == [check] and result["exit_code"] == 8 and not api.called and "aaa" not in str(result)


def test_a_card_is_made_where_there_is_none_and_the_terms_go_along(run, api, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "m.gguf").write_bytes(b"GGUF")
    artefacts.write(files, {"made": "gguf", "model": str(run), "samples": [{"row": "private"}]})
    result = publish(files, push=True)
    assert result["card_made"] and result["files"] == {"m.gguf": 4} and "NOTICE" in told(result, "licence")
    _, (_, _, sent), _ = api.called
    card = ModelCard(sent["path_or_fileobj"].decode()).data
    assert (card.license, card.base_model, card.base_model_relation) == ("gemma", "google/gemma-3-4b-it", "quantized")
    (run / "README.md").unlink()
    assert publish(run)["card_made"] and "LoRA adapter" in publishing._card(run, "adapter", result["base"])[0]


def test_a_merged_gemma4_goes_with_the_apache_licence(model_folder, tmp_path, api):
    folder = Path(shutil.copytree(model_folder, tmp_path / "merged"))
    api.gated = False
    found = publish(folder)
    assert found["base"]["license"] == "apache-2.0" and "Apache License 2.0" in told(found, "licence")
    artefacts.write(folder, {"base": "google/gemma-4-E2B-it"})
    assert "google/gemma-4-E2B-it, which is not gated, whose weights" in told(publish(folder), "licence")


def test_wrong_names_are_refused(run, tmp_path):
    for repo in (None, "mine", "me/mine/yours", "https://hub/me/mine"):
        with pytest.raises(UsageError, match="ORG/NAME"):
            publish(run, repo=repo)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CannotLoad, match="give the folder"):
        publish(tmp_path / "a.gguf")
