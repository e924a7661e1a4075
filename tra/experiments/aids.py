"""What makes TRA learn faster: aids to training, each tuned as every mechanism is; all read as published TRA does."""

from tra.experiments.experiment import Experiment
from tra.experiments.rows import Row
from tra.experiments.table1 import AIDED, SMALL_SCALE, SMOKE, TABLE1

COLUMNS = ("induct_once", "induct_recent", "copy_unique", "recall", "instructed", "flip_flop")

AIDS = Experiment(
    scales={
        name: {column: columns[column] for column in COLUMNS}
        for name, columns in (("smoke", SMOKE), ("small", SMALL_SCALE))
    },
    rows=("tra", AIDED, Row("tra", {"gate_bias": 3.0})),
    seeds=5,
    tuning=TABLE1.tuning,
    at_scale={"smoke": {"tuning": None}},
)
