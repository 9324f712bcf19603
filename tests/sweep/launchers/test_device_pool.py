"""Devices and cores of concurrent jobs."""

from tfm_blocks.sweep.launchers.local import DevicePool

VISIBLE = "CUDA_VISIBLE_DEVICES"


def test_a_job_gets_its_share_of_the_cores_and_the_least_used_devices():
    share = DevicePool({}, parallel=3, cores=8, devices=4, variable=VISIBLE)
    assert share.environment["OMP_NUM_THREADS"] == "2"
    one, two = share.take(2), share.take(1)
    assert (one, two) == (["0", "1"], ["2"])
    assert share.take(2) == ["3", "0"], "more than there are: one is lent twice"
    share.give_back(one)
    assert share.take(1) == ["1"]
    assert share.environment_with(two)["CUDA_VISIBLE_DEVICES"] == "2"


def test_only_devices_that_the_user_chose_are_assigned():
    share = DevicePool({"CUDA_VISIBLE_DEVICES": "5,GPU-8a"}, parallel=2, cores=2, devices=2, variable=VISIBLE)
    assert [share.take(1), share.take(1)] == [["5"], ["GPU-8a"]]


def test_threads_are_unchanged_for_one_job_at_a_time_or_if_the_user_set_them():
    assert "OMP_NUM_THREADS" not in DevicePool({}, parallel=1, cores=8, devices=0, variable=VISIBLE).environment
    assert (
        DevicePool({"OMP_NUM_THREADS": "3"}, parallel=4, cores=8, devices=0, variable=VISIBLE).environment[
            "OMP_NUM_THREADS"
        ]
        == "3"
    )


def test_the_environment_of_a_job_has_no_launcher_and_no_other_run():
    foreign = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_NAME NODE_RANK MASTER_ADDR MASTER_PORT"
    foreign += " TORCHELASTIC_RUN_ID PL_GLOBAL_SEED WANDB_SERVICE WANDB_RUN_ID"
    kept = {"WANDB_API_KEY": "k", "WANDB_MODE": "offline", "PATH": "p", "SLURM_JOB_ID": "1"}
    assert (
        DevicePool(
            dict.fromkeys(foreign.split(), "1") | kept, parallel=1, cores=1, devices=0, variable=VISIBLE
        ).environment
        == kept
    )
