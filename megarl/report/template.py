"""Define the style sheet and the Jinja template of the body of the report page."""

from megarl.report.rollouts import BROWSER

STYLE = (
    (BROWSER / "palette.css").read_text(encoding="utf-8")
    + """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
header p.label { margin: 0; color: var(--muted); }
h1 { margin: 4px 0 8px; font-size: 26px; line-height: 1.3; max-width: 34em; text-wrap: balance; }
h2 { margin: 40px 0 12px; font-size: 19px; }
h3 { margin: 20px 0 8px; font-size: 15px; }
.details, figcaption, .note { color: var(--muted); font-size: 13px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 0; padding: 0; list-style: none; }
.tiles li, figure, article { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tiles li { padding: 10px 18px; min-width: 130px; }
.tiles b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--muted); font-size: 13px; }
.figures, .examples { display: grid; gap: 14px; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.examples { grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); }
figure { margin: 0; padding: 12px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif !important; }
figcaption { margin-top: 6px; }
.step { fill: transparent; }
.step:hover { fill: var(--ink); fill-opacity: 0.12; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 5px 18px 5px 0; text-align: left; vertical-align: top; }
th, td { border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { unicode-bidi: isolate; font: 13px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
article { border-left: 4px solid var(--bad); padding: 10px 14px; min-width: 0; }
article.right { border-left-color: var(--good); }
article .verdict { font-weight: 600; color: var(--bad); }
article.right .verdict { color: var(--good); }
pre {
  margin: 4px 0 10px; max-height: 260px; overflow-y: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
}
.token { background: var(--token); color: var(--muted); border-radius: 4px; padding: 0 3px; }
a { color: var(--series-0); }
summary { cursor: pointer; color: var(--muted); margin: 12px 0; }
"""
)

PAGE = """\
{% macro score_table(rows, name, with_decoding) %}
<div class="scroll"><table>
<tr><th>{{ name }}</th>{% if with_decoding %}<th>decoding</th>{% endif %}
<th class="number">before</th><th class="number">after</th><th class="number">gain</th>
<th class="number">steps</th><th class="number">prompts</th></tr>
{% for row in rows %}
<tr><td><span class="swatch" style="background: var(--series-{{ row.series % num_colors }})"></span>
{{ row.name }}</td>
{% if with_decoding %}<td>{{ row.decoding }}</td>{% endif %}
<td class="number">{{ row.change.before }}</td><td class="number">{{ row.change.after }}</td>
<td class="number">{{ row.change.gain_text }}</td>
<td class="number">{{ row.change.before.step }} → {{ row.change.after.step }}</td>
<td class="number">{{ row.change.after.num_prompts or "not logged" }}</td></tr>
{% endfor %}
</table></div>
{% endmacro %}
{% macro pairs(rows) %}
<div class="scroll"><table>
{% for key, value in rows %}
<tr><td>{{ key }}</td><td><code>{{ value }}</code></td></tr>
{% endfor %}
</table></div>
{% endmacro %}
<body><main>
<header>
<p class="label">megarl report · {{ run.label }}</p>
<h1>{% if comparison %}{{ run.label }}: {% endif %}
{{- headline.sentence | replace(" ± ", "\u00a0±\u00a0") }}</h1>
<p class="details">{{ headline.details | join(" · ") }}</p>
<ul class="tiles">
{% if change %}
{% for end in (change.before, change.after) %}
<li><b>{{ "%.3f" | format(end.score) }}</b><span>validation at step {{ end.step }}</span></li>
{% endfor %}
<li><b>{{ "%+.3f" | format(change.gain) }}</b><span>gain</span></li>
{% endif %}
<li><b>{{ run.last_step }}</b><span>steps</span></li>
<li><b>{{ elapsed }}</b><span>wall time, first to last record</span></li>
</ul>
</header>
{% if run.warnings %}
<h2>Warnings</h2>
<ul>{% for warning in run.warnings %}<li>{{ warning }}</li>{% endfor %}</ul>
{% endif %}
{% if comparison %}
<h2>Runs compared</h2>
{{ score_table(comparison, "run", false) }}
{% endif %}
{% if scores %}
<h2>Validation{% if runs | length > 1 %} of {{ run.label }}{% endif %}</h2>
{{ score_table(scores, "data source", true) }}
{% endif %}
<h2>Curves</h2>
{% if runs | length > 1 %}
<p class="note">Reward and validation show every run; the other curves show {{ run.label }}.</p>
{% endif %}
<div class="figures">
{% for figure in figures %}
<figure>{{ figure.svg }}<figcaption>{{ figure.caption }}</figcaption></figure>
{% endfor %}
</div>
{% if timeline %}
<h2>Timeline{% if runs | length > 1 %} of {{ run.label }}{% endif %}</h2>
<figure>{{ timeline }}<figcaption>Some steps in the middle of the run and its last ones, or all of a short run; lines
mark where steps begin. Light grey: the trainer waits for samples or rewards. The bar of an engine: it has unfinished
requests. <code>megarl trace RUN</code> writes the whole run for ui.perfetto.dev.</figcaption></figure>
{% endif %}
{% if explained %}
<h2>Step {{ explained.step }} explained{% if runs | length > 1 %}: {{ run.label }}{% endif %}</h2>
<div class="scroll"><table>
{% for topic, words in explained.sentences %}<tr><td>{{ topic }}</td><td>{{ words }}</td></tr>{% endfor %}
</table></div>
<figure>{{ step_figure }}<figcaption>Signal of a token: advantage × weight of the correction × share in the aggregation.
<code>megarl explain-step RUN N</code> explains other steps.</figcaption></figure>
{% endif %}
{% if rollouts %}
<h2>Rollouts</h2>
<p><a href="report/rollouts.html">Browse {{ "{:,}".format(num_samples) }} recorded samples</a>
{% if runs | length > 1 %}of {{ run.label }} beside those of the other runs, {% endif %}
token by token: filter, search, sort.</p>
<div class="scroll"><table>
<tr><th>samples of</th><th class="number">step</th><th class="number">recorded</th><th class="number">right</th></tr>
{% for row in rollouts %}
<tr><td><a href="report/rollouts.html#{{ row.link }}">{{ row.verdicts.phase }}</a></td>
<td class="number">{{ row.verdicts.step }}</td><td class="number">{{ row.verdicts.num_samples }}</td>
<td class="number">{{ row.verdicts.num_right }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
{% if problem_shares or problems %}
<h2>Samples without a sound verdict</h2>
{% if problem_shares %}
<div class="scroll"><table>
<tr><th>share of the samples judged</th><th class="number">all steps</th><th class="number">last step</th></tr>
{% for row in problem_shares %}
<tr><td>{{ row.name }} (<code>{{ row.metric }}</code>)</td><td class="number">{{ row.mean }}</td>
<td class="number">{{ row.last }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
{% for group in problems %}
<h3>{{ group.title }}</h3>
<div class="examples">
{% for example in group.examples %}
<article>
<span class="verdict">{{ example.record.outcome | replace("_", " ") }}</span>
<span class="note">step {{ example.record.step }}, {{ example.record.phase }} · {{ example.record.data_source }} ·
sample {{ example.record.uid }}/{{ example.record.sample_index }}</span>
{% if example.record.reason %}<p><code>{{ example.record.reason }}</code></p>{% endif %}
{% if example.record.output %}
<span class="note">printed or said</span>
<pre class="response">{{ example.output }}</pre>
{% endif %}
<span class="note">response</span>
<pre class="response">{{ example.response }}</pre>
<span class="note">expected</span> <code>{{ example.record.ground_truth }}</code>
</article>
{% endfor %}
</div>
{% endfor %}
{% endif %}
{% if settings %}
<h2>Configuration</h2>
{{ pairs(key_settings) }}
<details><summary>All settings</summary>{{ pairs(settings.items()) }}</details>
{% endif %}
{% if versions %}
<h2>Environment</h2>
{{ pairs(versions.items()) }}
{% endif %}
<h2>Metrics</h2>
<details><summary>All {{ metrics | length }} metrics</summary>
<div class="scroll"><table>
<tr><th>metric</th>
{% for title in ("first", "last", "mean", "min", "max") %}<th class="number">{{ title }}</th>{% endfor %}</tr>
{% for metric in metrics %}
<tr><td><code>{{ metric.name }}</code></td>
{% for value in metric.values %}<td class="number">{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table></div></details>
</main></body>
</html>
"""
