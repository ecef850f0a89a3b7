// What differs between two versions: tensors, bytes, how much of each layer changed and, if it is asked for, how far.

import { html, nothing, render, svg } from "./vendor/lit-html/lit-html.js";
import * as api from "./api.js";
import { count, plural, share, size } from "./format.js";
import { state } from "./store.js";
import { show } from "./dialogs.js";

const OFFERED = 100;

/** Ask which other version `version` is compared with, and show what differs. */
export function compareVersion(version) {
  const known = state.history.updates ?? [];
  const others = known.filter((each) => each.run === version.run && each.id !== version.id && each.state === "SEALED");
  const offered = others.reverse().slice(0, OFFERED);
  const before = offered.find(({ id }) => id === version.base) ?? offered.find(({ created_at: seen }) => seen < version.created_at);
  const chosen = before ?? offered[0];
  const node = document.createElement("div");
  const look = (other, norms) => compared(node, ...inOrder(version, other), norms);
  const choose = (event) => look(offered.find(({ id }) => id === event.target.value), false);
  if (chosen !== undefined) look(chosen, false);
  return show(
    `Compare step ${count(version.step)}`,
    (close) => html`${chosen === undefined
        ? html`<p class="empty">No other version of this run has files to compare with.</p>`
        : html`<p class="actions"><label for="other">with</label>
            <select id="other" autofocus @change=${choose}>
              ${offered.map((each) => html`<option value=${each.id} ?selected=${each === chosen}>step ${count(each.step)}${each.generation > 1
                    ? ` gen ${each.generation}`
                    : ""}</option>`)}
            </select></p>`}
      ${node}
      <menu><button type="button" @click=${() => close(null)}>Close</button></menu>`,
    null,
  );
}

const inOrder = (version, other) => (other.created_at < version.created_at ? [other, version] : [version, other]);

let asked = 0;

async function compared(node, first, second, norms) {
  const mine = (asked += 1);
  render(html`<p class="empty">${norms ? "Reading both versions …" : "Asking …"}</p>`, node);
  let content;
  try {
    const found = await api.compare(first.id, second.id, norms);
    const canRead = !norms && ![first, second].some(({ kind }) => kind === "delta");
    content = difference(found, canRead ? () => compared(node, first, second, true) : null);
  } catch (problem) {
    if (!(problem instanceof api.Problem)) throw problem;
    content = html`<p class="fault">${problem.message}</p>`;
  }
  if (mine === asked) render(content, node);
}

function difference(found, readValues) {
  const { tensors, bytes, changed_tensors: changed, density, notes, norm, distance } = found;
  const facts = [
    ["Tensors", tensors[0] === tensors[1] ? count(tensors[0]) : `${count(tensors[0])} → ${count(tensors[1])}`],
    ["Bytes", bytes[0] === bytes[1] ? size(bytes[0]) : `${size(bytes[0])} → ${size(bytes[1])}`],
    ["Tensors that differ", count(changed)],
    ["Elements that differ", share(density)],
    ...(norm > 0 ? [["Change of the norm", `${share(distance / norm)} of ${Number(norm.toPrecision(3))}`]] : []),
  ];
  return html`<dl class="stage-times">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${named("Added", found.added)} ${named("Removed", found.removed)} ${named("Of another shape or dtype", found.reshaped)}
    ${layers(found)}
    ${notes.map((note) => html`<p class="hint">${note}</p>`)}
    ${readValues === null || found.layers.length === 0
      ? nothing
      : html`<div class="read"><button type="button" @click=${readValues}>Read the values …</button>
          <p class="hint">For the norms of layers and of their changes, and the elements that differ. Up to 4 GiB of each version are read.</p></div>`}`;
}

const named = (title, names) => names.length === 0
  ? nothing
  : html`<details><summary>${title}: ${plural(names.length, "tensor")}</summary>
      <ul class="sentences">${names.map((name) => html`<li>${name}</li>`)}</ul></details>`;

/** What a bar of a layer shows: how far it moved, else how many elements or tensors of it changed. */
function measureOf({ layers, distance }) {
  if (distance !== null) return { title: "Moved", of: (layer) => (layer.norm > 0 ? layer.distance / layer.norm : null) };
  if (layers.some(({ changed }) => changed !== null)) {
    return { title: "Elements", of: ({ changed, elements }) => (elements > 0 ? changed / elements : null) };
  }
  return { title: "Tensors", of: ({ changed_tensors: changed, tensors }) => (changed === null ? null : changed / tensors) };
}

function layers(found) {
  if (found.layers.length === 0) return nothing;
  const { title, of } = measureOf(found);
  const most = Math.max(...found.layers.map((layer) => of(layer) ?? 0), Number.MIN_VALUE);
  const hasBoth = title === "Moved" && found.density !== null;
  const changedOf = ({ changed, elements }) => (elements > 0 && changed !== null ? changed / elements : null);
  return html`<div class="layers" tabindex="0" role="group" aria-label="Layers"><table>
    <caption class="unseen">What changed, by layer</caption>
    <thead><tr>
      <th scope="col">Layer</th><th scope="col" class="number">Tensors</th>
      <th scope="col" class="stages"><span class="unseen">Share</span></th><th scope="col" class="number">${title}</th>
      ${hasBoth ? html`<th scope="col" class="number wide">Elements</th>` : nothing}
    </tr></thead>
    <tbody>
      ${found.layers.map((layer) => {
        const { changed_tensors: changed, tensors } = layer;
        const value = of(layer);
        const bar = svg`<rect class="kept" width="${((value ?? 0) / most) * 100}%" y="4" height="8" />`;
        return html`<tr>
          <th scope="row">${layer.layer.split(/(?<=[._])/).map((part) => html`${part}<wbr />`)}</th>
          <td class="number">${changed === null ? count(tensors) : `${count(changed)}/${count(tensors)}`}</td>
          <td class="stages"><svg class="bar" aria-hidden="true">${bar}</svg></td>
          <td class="number">${share(value)}</td>
          ${hasBoth ? html`<td class="number wide">${share(changedOf(layer))}</td>` : nothing}
        </tr>`;
      })}
    </tbody>
  </table></div>`;
}
