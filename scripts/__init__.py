"""The programs of a checkout. `speedrun/` and `scaling/` measure this project, and are not installed with it."""
