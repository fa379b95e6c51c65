"""Two-sided rounding: `solve` a weight against a Kronecker-factored Hessian, `certify` any result. Knows grids and Krons, never a model.

Every method in `METHODS` returns the same answer: nearest-plane rounding on `A (x) B`, that is, with N the unit factors of `bakron.kron`,

    t_ij = W_ij - sum over (i' <= i, j' <= j), not (i, j), of  N_B[i, i'] E_i'j' N_A[j, j']          V_ij = grid(t_ij)          E = V - W

(Birnick and Saab 2026, Thm. 3.2). They differ in schedule, that is in speed.
"""

from bakron.solver.after import polish, refit
from bakron.solver.certificate import Certificate, certify
from bakron.solver.orders import ORDERS
from bakron.solver.schedule import Sweep, Swept, identity_loss, targets
from bakron.solver.solution import METHODS, Solution, solve

__all__ = [
    "METHODS",
    "ORDERS",
    "Certificate",
    "Solution",
    "Sweep",
    "Swept",
    "certify",
    "identity_loss",
    "polish",
    "refit",
    "solve",
    "targets",
]
