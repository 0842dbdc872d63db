"""A whole session on a tiny model: who was timed, in which order, on what; its file, and what it refuses."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from toolkit.cli import main
from toolkit.errors import InputError, RunError
from toolkit.records.finetuning import FineTuning
from toolkit.records.session import Memory, Session
from toolkit.runs.timing import memory, order, session, time
from toolkit.runs.timing.cpu_watch import CpuWatch
from toolkit.runs.timing.order import Entry
from toolkit.runs.timing.profiling import kind_of, union

TOP = {"selector": "top-error", "budget": "layers=0.2"}
ARMS = [
    {"name": "qlora"},
    {"name": "quality", "protect": TOP},
    {"name": "speed", "protect": TOP, "adapt": {"selector": "depth", "budget": "layers=0.6"}},
]


def declared(model, **changes):
    return {
        "kind": "fine-tuning",
        "name": "timed",
        "question": "how fast?",
        "model": str(model),
        "tasks": {"sums": {"task": "arithmetic", "train_rows": 60}},
        "arms": ARMS,
        "levers": {"rank": 4, "batch": 2, "accumulation": 2, "length": 64},
        "analysis": {"baseline": "qlora"},
        "timing": {"seconds": 0.02, "rounds": 3, "batches": 3},
    } | changes


def run(model, out, **options):
    study = FineTuning.model_validate(declared(model, **options.pop("changes", {})))
    options = {"device": "cpu", "dtype": "float32", "beside_others": True, "progress": False} | options
    return Session.load(time(study, out=out, **options))


@pytest.fixture(scope="module")
def made(checkpoints, tmp_path_factory):
    out = tmp_path_factory.mktemp("timed")
    return out, run(checkpoints("llama"), out, seed=5)


def test_the_file_is_in_the_studys_timing_folder_and_reads_back(made):
    out, found = made
    (path,) = (out / "timing").glob("*.json")
    assert path.stem == found.session
    again = Session.model_validate(json.loads(path.read_text()))
    assert again == found and again.hash == found.hash
    assert (out / "study.json").exists() and (out / "profile.json").exists()


def test_the_baseline_was_timed_three_times_and_the_noisiest_arm_twice(made):
    _, found = made
    assert Counter(timed.arm for timed in found.arms) == {"qlora": 3, "quality": 2, "speed": 1}
    assert [t.duplicate for t in found.arms if t.arm == "qlora"] == [0, 1, 2]


def test_every_round_holds_every_entry_in_the_seeds_order(made):
    _, found = made
    assert found.seed == 5
    everyone = [Entry(timed.arm, timed.duplicate) for timed in found.arms]
    expected = order.rounds(everyone, 3, 5)
    for number in range(3):
        placed = {s.order: Entry(t.arm, t.duplicate) for t in found.arms for s in t.samples if s.round == number}
        assert [placed[place] for place in sorted(placed)] == expected[number]
    assert len({tuple(map(str, one)) for one in expected}) > 1


def test_samples_are_whole_cycles_of_one_list(made):
    _, found = made
    assert len(found.batches) == 4  # 3, rounded up to whole steps of 2
    real = sum(batch["real"] for batch in found.batches)
    for timed in found.arms:
        for sample in timed.samples:
            assert sample.cycles >= 1 and sample.seconds >= 0.02
            assert sample.steps == 2 * sample.cycles and sample.tokens == real * sample.cycles


def test_adapters_plans_memory_and_profiles_are_the_arms_own(made):
    _, found = made
    first = {t.arm: t for t in found.arms if t.duplicate == 0}
    rank, shapes = 4, {"attention": (64 + 64) * 2 + (64 + 32) * 2, "mlp": (64 + 96) * 3}
    assert first["qlora"].trainable == 3 * rank * sum(shapes.values()) == first["quality"].trainable
    assert first["speed"].trainable < first["qlora"].trainable
    assert first["quality"].plan.layers and not first["qlora"].plan.layers
    for timed in found.arms:
        assert (timed.memory is None) == (timed.duplicate > 0) == (timed.profile == {})
    for timed in first.values():
        assert 0 < timed.memory.base_allocated <= timed.memory.peak_allocated
        assert sum(timed.profile.values()) == pytest.approx(1, abs=0.01) and timed.profile["matrix products"] > 0


def test_deterministic_kernels_are_timed_as_such_and_beside_those_that_need_not_be(checkpoints, tmp_path, monkeypatch):
    """The lever reaches the samples, and the baseline is timed once without it in every round."""
    seen, plain = {}, session.Rounds._rounds

    def watched(self, get):
        def told(entry):
            driver = get(entry)
            model = driver._trainer.model

            def look(module, args, kwargs):
                seen.setdefault(entry, set()).add(torch.are_deterministic_algorithms_enabled())

            model.register_forward_pre_hook(look, with_kwargs=True)
            return driver

        plain(self, told)

    monkeypatch.setattr(session.Rounds, "_rounds", watched)
    levers = declared("x")["levers"] | {"deterministic": True}
    found = run(checkpoints("llama"), tmp_path, changes={"levers": levers}, arms=["qlora"])
    assert seen == {Entry("qlora", n): {True} for n in (0, 1, 2)} | {Entry("qlora", free=True): {False}}
    assert [s.round for s in found.free] == [0, 1, 2] and all(arm.levers.deterministic for arm in found.arms)
    assert Counter(arm.arm for arm in found.arms) == {"qlora": 3}
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_machine_and_the_labels(made):
    _, found = made
    assert found.machine.allocation.startswith("boot ") and found.machine.device
    assert any("resident sizes" in label for label in found.labels)
    assert found.provenance.compute_dtype == "float32" and found.provenance.seconds > 0


def test_a_second_session_of_one_process_is_marked_and_uses_the_same_list(made, checkpoints):
    out, found = made
    again = run(checkpoints("llama"), out, arms=["speed"])
    assert any("not the first session of its process" in label for label in again.labels)
    assert again.batches == found.batches and again.session != found.session
    assert again.machine.allocation == found.machine.allocation
    assert {timed.arm for timed in again.arms} == {"qlora", "speed"}
    assert again.seed != 5


def test_a_folder_of_another_study_or_other_weights_is_refused(made, checkpoints, tmp_path):
    out, _ = made
    with pytest.raises(InputError, match="declared with name 'timed', and the study now has 'other'"):
        run(checkpoints("llama"), out, changes={"name": "other"})
    with pytest.raises(InputError, match="the weights of"):
        run(checkpoints("llama", torch.float32), out)


def test_arms_on_different_lists_are_refused_before_anything_is_loaded(tmp_path):
    arms = [*ARMS, {"name": "wide", "levers": {"batch": 4}}]
    with pytest.raises(InputError, match="arm 'wide' has lever batch 4"):
        run("no/such", tmp_path, changes={"arms": arms, "factors": ["batch"]})


def test_too_few_rows_are_refused(checkpoints, tmp_path):
    with pytest.raises(InputError, match="100 batches of 2 examples, 200 in all, and the task gives 60"):
        run(checkpoints("llama"), tmp_path, changes={"timing": {"batches": 100}})


def test_a_busy_machine_is_refused_and_nothing_is_written(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(CpuWatch, "_others", lambda self: 1e6)
    with pytest.raises(RunError, match="--beside-others"):
        run(checkpoints("llama"), tmp_path, beside_others=False)
    assert not (tmp_path / "timing").exists()


@pytest.mark.slow
def test_arms_that_do_not_fit_together_are_built_in_turn(checkpoints, tmp_path, monkeypatch):
    """The room is said to be small; what is recorded is otherwise the same."""
    monkeypatch.setattr(memory, "room", lambda device: 0)
    building = []
    build = session.Bench.build
    monkeypatch.setattr(session.Bench, "build", lambda self, arm: building.append(arm) or build(self, arm))
    arms = ARMS[:2]
    found = run(checkpoints("llama"), tmp_path, changes={"arms": arms}, seed=1)
    assert any("built anew for each of its samples" in label for label in found.labels)
    assert all(len(timed.samples) == 3 for timed in found.arms)
    assert len(building) >= 2 + 3 * 5 - 2  # memory pass, and each sample but those that follow the same entry


def test_an_arm_that_needs_too_much_memory_is_left_out_by_name(checkpoints, tmp_path, monkeypatch):
    """The device's own error, raised where a device would raise it."""
    measured = session.Bench.memory

    def short(self, arm):
        if arm == "quality":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return measured(self, arm)

    monkeypatch.setattr(session.Bench, "memory", short)
    found = run(checkpoints("llama"), tmp_path, changes={"arms": ARMS[:2]})
    assert {timed.arm for timed in found.arms} == {"qlora"}
    assert any("arm quality: the device ran out of memory in the memory pass" in label for label in found.labels)
    monkeypatch.setattr(session.Bench, "memory", lambda self, arm: short(self, "quality"))
    with pytest.raises(RunError, match="arm qlora: the device ran out of memory"):
        run(checkpoints("llama"), tmp_path, changes={"arms": ARMS[:2]})


def test_earlier_sessions_choose_the_noisiest_arm(made):
    _, found = made

    def with_spread(arm, spread):
        timed = []
        for one in found.arms:
            change = spread if one.arm == arm else 0.0
            samples = [s.model_copy(update={"seconds": 1 + change * (s.round % 2), "steps": 100}) for s in one.samples]
            timed.append(one.model_copy(update={"samples": samples}))
        return found.model_copy(update={"arms": timed})

    quantized = {"qlora": 21, "quality": 17, "speed": 17}
    arms = list(quantized)
    assert order.noisiest(arms, "qlora", quantized, [with_spread("speed", 0.2)]) == "speed"
    assert order.noisiest(arms, "qlora", quantized, [with_spread("quality", 0.2)]) == "quality"


@pytest.mark.slow
def test_from_the_shell_sessions_are_new_processes(checkpoints, tmp_path, capsys):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.yaml").write_text(yaml.safe_dump(declared(checkpoints("llama"), arms=ARMS[:1])))
    options = ["--device", "cpu", "--dtype", "float32", "--beside-others", "--sessions", "2"]
    assert main(["time", str(folder), *options]) == 0
    found = [Session.load(path) for path in sorted((folder / "results" / "timing").glob("*.json"))]
    assert len(found) == 2 and found[0].batches == found[1].batches
    assert not any("first session of its process" in label for one in found for label in one.labels)


def test_the_shell_names_an_unknown_arm(checkpoints, tmp_path, capsys):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(declared(checkpoints("llama"))))
    assert main(["time", str(tmp_path), "--arm", "qualty"]) == 2
    assert "no arm 'qualty' is timed; did you mean 'quality'?" in capsys.readouterr().err


def test_a_study_without_fine_tuning_is_refused_by_its_kind(tmp_path):
    root = Path(__file__).parents[3]
    with pytest.raises(InputError, match="is a study of kind ranking-control, and sessions time"):
        time(root / "studies" / "ranking-control", out=tmp_path)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="without torchrun"):
        run("no/such", tmp_path)


# -- parts -------------------------------------------------------------------------------------------------------


def test_models_fit_together_where_their_bases_and_one_step_do():
    one = Memory(base_allocated=0, base_reserved=10, peak_allocated=0, peak_reserved=25)
    two = Memory(base_allocated=0, base_reserved=20, peak_allocated=0, peak_reserved=26)
    # bases 10 + 20, and the larger of the steps' 15 and 6
    assert memory.fits([one, two], 0, 100, share=0.45) and not memory.fits([one, two], 0, 100, share=0.44)
    assert memory.fits([one, two], 5, 100, share=0.35)  # 5 bytes of each are the process's own


def test_the_memory_pass_sees_what_building_keeps_and_what_steps_need():
    cpu = torch.device("cpu")
    found = memory.measure(cpu, lambda: torch.ones(2**24), lambda built: built.double().sum())
    assert found.peak_allocated - found.base_allocated == pytest.approx(2**27, rel=0.1)
    assert found.base_allocated == found.base_reserved


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matrix products"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "dequantization"),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and casts"),
        ("void at::native::cunn_SoftMaxForward<4, float>", "embedding, loss and sums"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise and the rest"),
        ("aten::mm", "matrix products"),
        ("aten::mul", "elementwise and the rest"),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert kind_of(name) == kind


def test_overlapping_kernels_count_once():
    assert union([(0, 10), (5, 12), (20, 30), (21, 22), (30, 31)]) == 12 + 11
    assert union([]) == 0
