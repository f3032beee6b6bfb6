// Draws each element with data-chart when it comes into view. What a chart holds: curves.py, line_chart and area_chart.
(() => {
  const { Plotting, Range1d, HoverTool, CrosshairTool, NumeralTickFormatter } = Bokeh;
  const HEIGHT = 190, FAINT = '#8d8883', CLEAR = 'rgba(0,0,0,0)';

  const short = v => v !== 0 && (Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));
  const nearest = (xs, at) => xs.reduce((best, x, i) => Math.abs(x - at) < Math.abs(xs[best] - at) ? i : best, 0);

  // Texts are set as text: names come from the run and are not trusted.
  function tooltip(lines, step) {
    const tip = document.createElement('div');
    tip.className = 'tip';
    tip.append('step ' + step);
    for (const line of lines) {
      const { x, y } = line.raw ?? line, index = x.indexOf(step);
      if (index < 0) continue;
      const row = document.createElement('div'), dot = document.createElement('span');
      dot.style.cssText = `display:inline-block;width:8px;height:8px;border-radius:2px;margin-right:6px;background:${line.color}`;
      row.append(dot, line.name + '  ' + short(y[index]));
      tip.append(row);
    }
    return tip;
  }

  function addLine(figure, line) {
    const { x, y, raw, band, color } = line;
    if (band) figure.varea({ x: band.x, y1: band.low, y2: band.high, color, fill_alpha: 0.18 });
    if (raw) figure.line({ x: raw.x, y: raw.y, color, line_alpha: 0.28 });
    figure.line({ x, y, color, line_width: 2, line_join: 'round' });
    if (line.dots) figure.scatter({ x, y, color, size: 6 });
  }

  function addLayers(figure, lines) {
    let below = lines[0].x.map(() => 0);
    for (const { x, y, color } of lines) {
      const above = y.map((value, i) => below[i] + value);
      figure.varea({ x, y1: below, y2: above, color, fill_alpha: 0.85 });
      below = above;
    }
  }

  // Bokeh looks for a glyph under the pointer: an unseen line over all steps, so that the tip is there at any height.
  function addTip(figure, drawn, middle) {
    const lines = drawn.filter(line => !line.marker);
    const steps = [...new Set(lines.flatMap(line => (line.raw ?? line).x))].sort((a, b) => a - b);
    const renderer = figure.line({ x: steps, y: steps.map(() => middle), line_alpha: 0 });
    const tooltips = (_, { x }) => tooltip(lines, steps[nearest(steps, x)]);
    figure.add_tools(new HoverTool({ mode: 'vline', renderers: [renderer], tooltips, point_policy: 'follow_mouse' }));
    figure.add_tools(new CrosshairTool({ dimensions: 'height', line_color: FAINT, line_alpha: 0.6 }));
  }

  function draw(element) {
    const chart = JSON.parse(element.dataset.chart), [low, high] = chart.y;
    const figure = Plotting.figure({
      height: HEIGHT, sizing_mode: 'stretch_width', tools: '', toolbar_location: null,
      x_range: new Range1d({ start: chart.x[0], end: chart.x[1] }), y_range: new Range1d({ start: low, end: high }),
      y_axis_type: chart.log ? 'log' : 'linear',
      background_fill_color: CLEAR, border_fill_color: CLEAR, outline_line_color: null, min_border: 4, min_border_right: 14,
    });
    const [steps] = figure.xaxis, [values] = figure.yaxis, [across] = figure.xgrid, [along] = figure.ygrid;
    for (const axis of [steps, values]) {
      Object.assign(axis, { axis_line_color: null, major_tick_line_color: null, minor_tick_line_color: null,
        major_label_text_color: FAINT, major_label_text_font: 'system-ui, sans-serif', major_label_text_font_size: '10.5px' });
    }
    Object.assign(steps, { axis_line_color: FAINT, axis_line_alpha: 0.6 });
    steps.formatter = new NumeralTickFormatter({ format: '0.[00]a' });
    steps.ticker.min_interval = 1;
    values.ticker.desired_num_ticks = 5;
    across.visible = false;
    Object.assign(along, { grid_line_color: FAINT, grid_line_alpha: 0.25 });
    chart.stacked ? addLayers(figure, chart.lines) : chart.lines.forEach(line => addLine(figure, line));
    addTip(figure, chart.lines, (low + high) / 2);
    Plotting.show(figure, element);
  }

  const waiting = new Set(document.querySelectorAll('[data-chart]'));
  const drawOnce = element => { if (waiting.delete(element)) draw(element); };
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) { drawOnce(entry.target); seen.unobserve(entry.target); }
  }, { rootMargin: '300px' });
  waiting.forEach(element => seen.observe(element));
  window.addEventListener('beforeprint', () => [...waiting].forEach(drawOnce));
})();
