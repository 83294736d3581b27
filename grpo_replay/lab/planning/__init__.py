"""Paper B's theory of replay as a calculator: how long to keep rollouts, how often to reuse them.

`theory` has the formulas and designs, `expected` assumptions before a first run, `estimate`
measured ones, `plan` the answer of the command. Imports inspection and the folders below it; no
torch.
"""
