"""The rollout engines, one file each. A file's name is the value of `rollout.engine`."""
