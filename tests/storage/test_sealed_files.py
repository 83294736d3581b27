"""files.json: what a run has written, with digests."""

from grpo_replay.storage.sealed_files import cut_back_seal, read_seal, seal_files, sealed_problem

FILES = (
    *("recipe.yaml", "recipes/step_000002.yaml", "rollouts/step_000001.parquet"),
    *("rollouts/step_000003.parquet", "eval/step_000002.json", "metrics.jsonl"),
    *("journal/segment_000001.journal", "checkpoints/step_000002/manifest.json"),
)


def test_what_a_run_writes_is_listed_changes_are_found_and_a_resume_cuts_the_list_back(tmp_path):
    for name in (*FILES, "environment.json", "log/attempt_001.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"what is in {name}")
    seal_files(tmp_path)
    listed = read_seal(tmp_path)
    assert set(listed) == set(FILES)
    for name, facts in listed.items():
        path, data = tmp_path / name, (tmp_path / name).read_bytes()
        assert sealed_problem(path, facts) is None
        path.write_bytes(data[:3] + b"X" + data[4:])
        assert sealed_problem(path, facts)
        path.unlink()
        assert sealed_problem(path, facts)
        path.write_bytes(data)
    cut_back_seal(tmp_path, 2)
    kept = {"recipe.yaml", "rollouts/step_000001.parquet", "eval/step_000002.json"}
    assert set(read_seal(tmp_path)) == kept
