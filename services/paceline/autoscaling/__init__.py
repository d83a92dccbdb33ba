"""How many targets and drafts an application should have: one Serve autoscaling policy for both.

Serve's controller makes a `FleetPolicy` from the YAML's `autoscaling_policy` and calls it in every
control loop (0.1 s). Both deployments are decided together because drafts may be down to zero:
then only the targets can say that drafts are missing. `reports` reads what replicas say, `demand`
turns it into replicas, `policy` decides. Serve pickles this package into its controller by value,
so it imports nothing else of Paceline. It knows no sequences, tokens or processes, and reads no
clock.
"""

from paceline.autoscaling.demand import knob_problems
from paceline.autoscaling.policy import FleetPolicy

__all__ = ["FleetPolicy", "knob_problems"]
