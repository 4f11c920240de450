"""From what is asked to what can be started: this machine as it is now, the plan with its files, another way."""
