"""Real trainers whose start-up is measured.

`dlrm_stock.py` and `dlrm_initopt.py` are one trainer as its plain script and as its initopt version. `golden.py`,
`dlrm_main.py`, `easyrec.py` and `hstu.py` have the structure of public trainers (the order of their steps, who plans,
loaders, pipelines, how they are launched) in our own code, with made data, and know nothing of initopt.
"""
