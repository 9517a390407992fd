"""`--preflight`: a node that fails a check stays out, and the others train."""

from __future__ import annotations

from cluster.cluster import MakeCluster
from cluster.jobs import STEPS_ALONE, Job
from holdfast.observe import record
from holdfast.observe.state import fold


def test_a_node_that_is_not_fit_stays_out_and_the_other_trains(cluster: MakeCluster) -> None:
    """Its checkpoint target is a file, where a directory is meant."""
    pair = cluster()
    job = Job(pair, "--exit-code-from-cause", nnodes="1:2", conf="last_call_timeout=0", script=STEPS_ALONE)
    target = pair.folder / "file"
    target.touch()
    job.start(0)
    world = job.wait_generation(0, 0)
    job.start(1, flags=("--preflight",), env={"CHECKPOINT_DIR": str(target)})
    assert job.ends(1) == [88]
    said = [line for line in pair.err(1).splitlines() if "not fit" in line]
    assert len(said) == 1, pair.err(1)
    assert said[0].startswith(f"holdfast: this node is not fit: checkpoint: writing {target}/")
    assert job.goes_on(world)
    job.release()
    assert job.ends(0) == [0]
    assert pair.incidents(0) == []
    [own] = pair.events(1, "node.examined")
    assert not own["fit"] and own["failed"][0].startswith(f"checkpoint: writing {target}/")
    notes = record.read(pair.run_dir(0) / record.NAME)
    [(node, told)] = [(noted.node, noted.what) for noted in notes if isinstance(noted.what, record.NodeExamined)]
    assert list(told.failed) == own["failed"], "the job's record says why a node is missing"
    state = fold(notes)
    assert state.said[-1] == f"{node} stays out: {own['failed'][0]}" and node not in state.nodes
