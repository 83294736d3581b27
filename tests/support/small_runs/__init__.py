"""Small runs for the tests, one kind per module; `fixtures` makes the shared ones.

trained       the real trainer on the shipped tiny model: a few seconds each
asynchronous  the real trainer, collector and journal with fake policy servers
synthetic     the files of a run, written by the real buffer, composer and writers, without a model
experiments   sweeps and runs for reports, without a model
ranks         several ranks under a real launcher, without a trainer; they fail on request
"""
