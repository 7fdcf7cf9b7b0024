"""The node process: finds the cards, serves the kubelet, gives each container exactly the card that was booked.

Room:  pure parts (`inventory`, `health`, `isolating`, `overlapping`, `preferring`) and the thin ones that use them
       (`node_pods`, `slots`, `serving`, `reporting`, `process`). It decides nothing about who gets which card: that
       stands in the grant on the pod.
Door:  `process.Agent(...).run(stop)`.
"""
