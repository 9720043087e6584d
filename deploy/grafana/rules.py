"""Prints the expressions of a dashboard as a rule file for promtool. Usage: rules.py DASHBOARD"""

import json
import sys

# Values in place of Grafana's variables.
VARIABLES = {"$__rate_interval": "5m", "$namespace": ".*", "$pool": ".*"}


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        panels = json.load(file)["panels"]
    rules = []
    for panel in panels:
        for target in panel.get("targets", []):
            expr = target["expr"]
            for variable, value in VARIABLES.items():
                expr = expr.replace(variable, value)
            rules.append({"record": f"panel_{panel['id']}:{target['refId']}", "expr": expr})
    # JSON is YAML.
    print(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))


if __name__ == "__main__":
    main()
