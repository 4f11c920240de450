import sys, json, argparse
from pathlib import Path
import checkpoint_ranks
r = checkpoint_ranks.run_rank(Path(sys.argv[1]), int(float(sys.argv[2])), int(sys.argv[3]))
if r: print("ROW " + json.dumps(r))
