// Exponential moving averages, each value weighed by how many points it stands for.

/** The averages of `[{mean, points}]`, with the weight of what came before at each point; the first values are not drawn to zero. */
export function smoothed(values, weight) {
  let [average, share] = [0, 0];
  return values.map(({ mean, points }) => {
    if (!Number.isFinite(mean)) return share ? average / share : NaN;
    const kept = weight ** Math.max(points, 1);
    average = average * kept + mean * (1 - kept);
    share = share * kept + (1 - kept);
    return average / share;
  });
}
